-- name: create
-- Two workers that begin at once would both create the table. `committed` are bytes; the other
-- columns of an earlier version are not used any more, and what it had staged is not either.
SELECT pg_advisory_xact_lock(1885695603);
CREATE TABLE IF NOT EXISTS penstock_sink (
    worker    text PRIMARY KEY,
    committed bigint NOT NULL DEFAULT 0,
    messages  bigint NOT NULL DEFAULT 0
);
ALTER TABLE penstock_sink ADD COLUMN IF NOT EXISTS messages bigint NOT NULL DEFAULT 0;
-- name: is there
SELECT attname FROM pg_attribute
WHERE attrelid = to_regclass('penstock_sink') AND attname = 'messages'
-- name: begin
INSERT INTO penstock_sink (worker) VALUES (%s) ON CONFLICT (worker) DO NOTHING
-- name: mark
SELECT committed, messages FROM penstock_sink WHERE worker = %s
-- name: move
UPDATE penstock_sink SET committed = %s, messages = %s
WHERE worker = %s AND committed = %s AND messages = %s
