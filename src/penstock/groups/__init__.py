"""Consumer groups: many members on one stream, messages taken and acknowledged one by one."""
