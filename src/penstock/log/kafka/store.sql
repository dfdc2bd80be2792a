-- name: schema
-- Up to where each partition was read and when, and before which offset older versions were let go.
CREATE TABLE IF NOT EXISTS places (
  stream_id  INTEGER NOT NULL,
  partition  INTEGER NOT NULL,
  next       INTEGER NOT NULL,
  floor      INTEGER NOT NULL DEFAULT 0,
  seen_us    INTEGER NOT NULL,
  PRIMARY KEY (stream_id, partition)
) STRICT, WITHOUT ROWID;
-- When what was appended: which versions are old enough to be let go.
CREATE TABLE IF NOT EXISTS marks (
  stream_id  INTEGER NOT NULL,
  partition  INTEGER NOT NULL,
  time_us    INTEGER NOT NULL,
  next       INTEGER NOT NULL,
  PRIMARY KEY (stream_id, partition, time_us)
) STRICT, WITHOUT ROWID;
-- Entries of tables, each with its older versions; a deleted one has no value. The rank says
-- after which growth of the stream the key lived in the partition.
CREATE TABLE IF NOT EXISTS versions (
  stream_id  INTEGER NOT NULL,
  key        BLOB NOT NULL,
  rank       INTEGER NOT NULL,
  offset     INTEGER NOT NULL,
  partition  INTEGER NOT NULL,
  value      BLOB,
  PRIMARY KEY (stream_id, key, rank, offset)
) STRICT, WITHOUT ROWID;
-- The ids that an ids="producer" stream holds: integers as ranges, others one by one.
CREATE TABLE IF NOT EXISTS id_ranges (
  stream_id  INTEGER NOT NULL,
  first      INTEGER NOT NULL,
  last       INTEGER NOT NULL,
  PRIMARY KEY (stream_id, first)
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS ids (
  stream_id  INTEGER NOT NULL,
  id         TEXT NOT NULL,
  time_us    INTEGER NOT NULL,
  PRIMARY KEY (stream_id, id)
) STRICT, WITHOUT ROWID;

-- name: place
SELECT next, floor FROM places WHERE stream_id = ? AND partition = ?;

-- name: save_place
INSERT INTO places (stream_id, partition, next, floor, seen_us) VALUES (?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET next = excluded.next, floor = max(floor, excluded.floor);

-- name: seen
SELECT seen_us FROM places WHERE stream_id = ? AND partition = ?;

-- name: save_seen
UPDATE places SET seen_us = max(seen_us, ?) WHERE stream_id = ? AND partition = ? AND next >= ?;

-- name: forget_place
DELETE FROM places WHERE stream_id = ? AND partition = ?;

-- name: forget_all_marks
DELETE FROM marks WHERE stream_id = ? AND partition = ?;

-- name: forget_partition
DELETE FROM versions WHERE stream_id = ? AND partition = ?;

-- name: save_mark
INSERT INTO marks (stream_id, partition, time_us, next) VALUES (?, ?, ?, ?)
ON CONFLICT DO UPDATE SET next = excluded.next;

-- name: floor
SELECT max(next) FROM marks WHERE stream_id = ? AND partition = ? AND time_us < ?;

-- name: forget_marks
DELETE FROM marks WHERE stream_id = ? AND partition = ? AND next < ?;

-- name: save_version
INSERT INTO versions (stream_id, key, rank, offset, partition, value) VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET value = excluded.value;

-- name: forget_versions
-- Versions that were replaced before the floor.
DELETE FROM versions
WHERE stream_id = ?1 AND key = ?2 AND partition = ?3 AND offset < (
  SELECT max(offset) FROM versions
  WHERE stream_id = ?1 AND key = ?2 AND partition = ?3 AND offset < ?4
);

-- name: latest
SELECT v.key, v.value, v.partition, v.offset
FROM carray(?) AS wanted CROSS JOIN versions AS v
WHERE v.stream_id = ?2 AND v.key = wanted.value AND v.value IS NOT NULL
  AND (v.rank, v.offset) = (
    SELECT w.rank, w.offset FROM versions AS w
    WHERE w.stream_id = ?2 AND w.key = wanted.value
    ORDER BY w.rank DESC, w.offset DESC LIMIT 1
  );

-- name: latest_at
SELECT v.key, v.value, v.partition, v.offset
FROM carray(?) AS wanted CROSS JOIN versions AS v
WHERE v.stream_id = ?2 AND v.key = wanted.value AND v.value IS NOT NULL
  AND (v.rank, v.offset) = (
    SELECT w.rank, w.offset FROM versions AS w
    WHERE w.stream_id = ?2 AND w.key = wanted.value AND w.offset < (
      SELECT p.value FROM json_each(?3) AS p WHERE p.key = CAST(w.partition AS TEXT)
    )
    ORDER BY w.rank DESC, w.offset DESC LIMIT 1
  );

-- name: page
SELECT v.key, v.value, v.partition, v.offset FROM versions AS v
WHERE v.stream_id = ?1 AND v.key > ?2 AND v.value IS NOT NULL
  AND (v.rank, v.offset) = (
    SELECT w.rank, w.offset FROM versions AS w
    WHERE w.stream_id = ?1 AND w.key = v.key
    ORDER BY w.rank DESC, w.offset DESC LIMIT 1
  )
ORDER BY v.key LIMIT ?3;

-- name: page_at
SELECT v.key, v.value, v.partition, v.offset FROM versions AS v
WHERE v.stream_id = ?1 AND v.key > ?2 AND v.value IS NOT NULL
  AND (v.rank, v.offset) = (
    SELECT w.rank, w.offset FROM versions AS w
    WHERE w.stream_id = ?1 AND w.key = v.key AND w.offset < (
      SELECT p.value FROM json_each(?4) AS p WHERE p.key = CAST(w.partition AS TEXT)
    )
    ORDER BY w.rank DESC, w.offset DESC LIMIT 1
  )
ORDER BY v.key LIMIT ?3;
