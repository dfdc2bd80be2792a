"""The test kit that ships with Penstock: the contract suite, faults as input, and the oracle.

Needs `penstock[testing]`.
"""
