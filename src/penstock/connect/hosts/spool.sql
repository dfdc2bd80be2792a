-- name: version
PRAGMA user_version
-- name: create workers
CREATE TABLE workers (
    worker   TEXT PRIMARY KEY,
    standing TEXT NOT NULL,      -- JSON of a WorkerStanding
    left_ms  INTEGER             -- when it was said that it will not come back
) WITHOUT ROWID;
-- name: create sinks
CREATE TABLE sinks (
    name               TEXT PRIMARY KEY, -- WORKER, or WORKER#STREAM
    applied_offset     INTEGER NOT NULL,
    applied_messages   INTEGER NOT NULL,
    committed_offset   INTEGER NOT NULL,
    committed_messages INTEGER NOT NULL,
    voted_offset       INTEGER,          -- where what waits for its outcome ends
    voted_messages     INTEGER
) WITHOUT ROWID;
-- name: create chunks
CREATE TABLE chunks (
    id    INTEGER PRIMARY KEY,
    name  TEXT NOT NULL,
    start INTEGER NOT NULL,   -- bytes before it
    first INTEGER NOT NULL,   -- messages before it
    last  INTEGER NOT NULL,   -- messages before its end
    data  BLOB NOT NULL       -- MessagePack: [key, time, data] of each message
);
CREATE INDEX chunks_by_name ON chunks (name, first);
-- name: create commits
CREATE TABLE commits (
    number         INTEGER PRIMARY KEY AUTOINCREMENT,
    name           TEXT NOT NULL,
    start_offset   INTEGER NOT NULL,
    start_messages INTEGER NOT NULL,
    end_offset     INTEGER NOT NULL,
    end_messages   INTEGER NOT NULL
);
CREATE INDEX commits_by_name ON commits (name, end_messages, number);
-- name: create dead
CREATE TABLE dead (
    name    TEXT NOT NULL,
    number  INTEGER NOT NULL, -- messages before it
    start   INTEGER NOT NULL, -- bytes before it
    time_ms INTEGER NOT NULL, -- when it was put aside
    key     BLOB,
    time_ns INTEGER NOT NULL,
    data    BLOB NOT NULL,
    error   TEXT NOT NULL,
    PRIMARY KEY (name, number)
) WITHOUT ROWID;
-- name: standings
SELECT worker, standing FROM workers
-- name: save standing
INSERT INTO workers VALUES (?, ?, NULL)
ON CONFLICT (worker) DO UPDATE SET standing = excluded.standing, left_ms = NULL
-- name: leave
UPDATE workers SET standing = ?, left_ms = ? WHERE worker = ?
-- name: gone workers
SELECT worker FROM workers WHERE left_ms < ?
-- name: forget worker
DELETE FROM workers WHERE worker = ?
-- name: forget sinks
DELETE FROM sinks WHERE name = :worker OR substr(name, 1, length(:worker) + 1) = :worker || '#'
-- name: has commits
SELECT count(*) FROM commits
WHERE name = :worker OR substr(name, 1, length(:worker) + 1) = :worker || '#'
-- name: sink
SELECT applied_offset, applied_messages, committed_offset, committed_messages,
    voted_offset, voted_messages FROM sinks WHERE name = ?
-- name: save sink
INSERT OR REPLACE INTO sinks VALUES (?, ?, ?, ?, ?, ?, ?)
-- name: add
INSERT INTO chunks (name, start, first, last, data) VALUES (?, ?, ?, ?, ?)
-- name: discard
DELETE FROM chunks WHERE name = ? AND first >= ?
-- name: forget chunks
DELETE FROM chunks WHERE name = ? AND last <= ?
-- name: chunk
SELECT first, data FROM chunks WHERE name = ? AND last > ? AND first < ? ORDER BY first LIMIT 1
-- name: add commit
INSERT INTO commits (name, start_offset, start_messages, end_offset, end_messages)
VALUES (?, ?, ?, ?, ?)
-- name: next commit of
SELECT * FROM commits WHERE name = ? ORDER BY end_messages, number LIMIT 1
-- name: next commit
SELECT * FROM commits ORDER BY number LIMIT 1
-- name: names with commits
SELECT DISTINCT name FROM commits
-- name: waiting bytes
SELECT coalesce(sum(end_offset - start_offset), 0) FROM commits
-- name: waiting bytes of
SELECT coalesce(sum(end_offset - start_offset), 0) FROM commits WHERE name = ? AND end_messages <= ?
-- name: forget commits
DELETE FROM commits WHERE name = ? AND end_messages <= ?
-- name: forget commits of
DELETE FROM commits WHERE name = ?
-- name: forget commit
DELETE FROM commits WHERE number = ?
-- name: bury
INSERT OR REPLACE INTO dead VALUES (?, ?, ?, ?, ?, ?, ?, ?)
-- name: dead
SELECT name, number, start, time_ms, key, time_ns, data, error FROM dead ORDER BY time_ms, name, number
-- name: earlier tables
SELECT name FROM sqlite_master WHERE type = 'table' AND name = 'stretches'
-- name: earlier votes
SELECT worker FROM votes LIMIT 1
-- name: earlier ends
SELECT worker, end FROM ends
-- name: earlier stretches
SELECT number, worker, first, last FROM stretches ORDER BY number
-- name: earlier messages
SELECT key, time_ns, data FROM messages WHERE worker = ? AND id BETWEEN ? AND ? ORDER BY id
-- name: drop earlier
DROP TABLE messages; DROP TABLE votes; DROP TABLE ends; DROP TABLE stretches;
