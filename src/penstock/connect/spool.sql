-- name: create messages
CREATE TABLE IF NOT EXISTS messages (
    id      INTEGER PRIMARY KEY AUTOINCREMENT,
    worker  TEXT NOT NULL,
    key     BLOB,
    time_ns INTEGER NOT NULL,
    data    BLOB NOT NULL
);
-- name: create votes
CREATE TABLE IF NOT EXISTS votes (
    worker TEXT PRIMARY KEY,
    last   INTEGER NOT NULL, -- of its messages
    end    INTEGER NOT NULL  -- of its bytes
) WITHOUT ROWID;
-- name: create ends
CREATE TABLE IF NOT EXISTS ends (
    worker TEXT PRIMARY KEY,
    last   INTEGER NOT NULL,
    end    INTEGER NOT NULL
) WITHOUT ROWID;
-- name: create stretches
CREATE TABLE IF NOT EXISTS stretches (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    worker TEXT NOT NULL,
    first  INTEGER NOT NULL,
    last   INTEGER NOT NULL,
    bytes  INTEGER NOT NULL
);
-- name: add
INSERT INTO messages (worker, key, time_ns, data) VALUES (?, ?, ?, ?)
-- name: vote of
SELECT last, end FROM votes WHERE worker = ?
-- name: end of
SELECT last, end FROM ends WHERE worker = ?
-- name: vote
INSERT INTO votes
SELECT :worker, coalesce(max(id), 0), :end FROM messages WHERE worker = :worker
-- name: forget vote
DELETE FROM votes WHERE worker = ?
-- name: make ready
INSERT INTO stretches (worker, first, last, bytes)
SELECT :worker, min(id), max(id), sum(length(data)) FROM messages
WHERE worker = :worker AND id > :after AND id <= :last
HAVING count(*) > 0
-- name: end
INSERT INTO ends VALUES (:worker, :last, :end)
ON CONFLICT (worker) DO UPDATE SET last = excluded.last, end = excluded.end
-- name: discard
DELETE FROM messages WHERE worker = ? AND id > ?
-- name: waiting bytes
SELECT coalesce(sum(bytes), 0) FROM stretches
-- name: next stretch
SELECT number, worker, first, last FROM stretches ORDER BY number LIMIT 1
-- name: messages
SELECT id, worker, key, time_ns, data FROM messages
WHERE worker = ? AND id BETWEEN ? AND ? ORDER BY id LIMIT ?
-- name: forget messages
DELETE FROM messages WHERE worker = ? AND id BETWEEN ? AND ?
-- name: forget stretch
DELETE FROM stretches WHERE number = ?
