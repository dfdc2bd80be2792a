-- Every statement that the embedded log runs, by name.

-- name: state
SELECT commit_number, epoch, time_us FROM state;

-- name: save_state
UPDATE state SET commit_number = ?, epoch = ?, time_us = ?;

-- name: namespaces
SELECT name FROM namespaces ORDER BY name;

-- name: has_namespace
SELECT 1 FROM namespaces WHERE name = ?;

-- name: insert_namespace
INSERT INTO namespaces (name, created_us) VALUES (?, ?);

-- name: delete_namespace
DELETE FROM namespaces WHERE name = ?;

-- name: stream_names
SELECT namespace, name FROM streams ORDER BY namespace, name;

-- name: streams_in_namespace
SELECT name FROM streams WHERE namespace = ? ORDER BY name;

-- name: stream_version
SELECT id, version FROM streams WHERE namespace = ? AND name = ?;

-- name: stream
SELECT id, namespace, name, spec, grown, created_us, version, seal FROM streams WHERE id = ?;

-- name: records_of_stream
SELECT schema FROM records WHERE stream_id = ? ORDER BY version;

-- name: insert_stream
INSERT INTO streams (namespace, name, spec, grown, created_us, version, seal)
VALUES (?, ?, ?, ?, ?, 1, 0) RETURNING id;

-- name: update_stream
UPDATE streams SET spec = ?, grown = ?, version = version + 1 WHERE id = ?;

-- name: seal_stream
UPDATE streams SET seal = ? WHERE id = ?;

-- name: delete_stream
DELETE FROM streams WHERE id = ?;

-- name: insert_record
INSERT INTO records (stream_id, version, schema) VALUES (?, ?, ?);

-- name: insert_partition
INSERT INTO partitions (stream_id, partition, first_offset, next_offset, bytes, unmerged, merged_to)
VALUES (?, ?, 0, 0, 0, 0, 0);

-- name: next_offset
SELECT next_offset FROM partitions WHERE stream_id = ? AND partition = ?;

-- name: save_partition
UPDATE partitions SET next_offset = ?, bytes = bytes + ?, unmerged = unmerged + ?
WHERE stream_id = ? AND partition = ?;

-- name: offsets
SELECT partition, first_offset, next_offset FROM partitions WHERE stream_id = ?
ORDER BY partition;

-- name: offsets_of_partition
SELECT first_offset, next_offset FROM partitions WHERE stream_id = ? AND partition = ?;

-- name: insert_blob
INSERT INTO blobs (data) VALUES (?) RETURNING id;

-- name: delete_blob
DELETE FROM blobs WHERE id = ?;

-- name: insert_batch
INSERT INTO batches
  (stream_id, partition, first_offset, rows, blob_id, bytes, checksum, commit_number, time_us,
   runs, seal)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: delete_batch
DELETE FROM batches WHERE stream_id = ? AND partition = ? AND first_offset = ? AND blob_id = ?;

-- name: batch_before
-- The last batch that starts at or before an offset: it holds the offset, or none does.
SELECT first_offset, rows, blob_id, bytes, checksum, commit_number, time_us, runs, seal
FROM batches WHERE stream_id = ? AND partition = ? AND first_offset <= ?
ORDER BY first_offset DESC LIMIT 1;

-- name: batch_at_time
SELECT first_offset, rows, runs FROM batches
WHERE stream_id = ? AND partition = ? AND time_us >= ?
ORDER BY time_us, first_offset LIMIT 1;

-- name: batches_from
SELECT first_offset, rows, blob_id, bytes, checksum, commit_number, time_us, runs, seal
FROM batches WHERE stream_id = ? AND partition = ? AND first_offset >= ?
ORDER BY first_offset LIMIT ?;

-- name: oldest_batches
SELECT first_offset, rows, blob_id, bytes, time_us FROM batches
WHERE stream_id = ? AND partition = ? ORDER BY first_offset LIMIT ?;

-- name: blobs_of_stream
SELECT blob_id FROM batches WHERE stream_id = ?;

-- name: batch_count
SELECT count(*) FROM batches;

-- name: producer
SELECT epoch, sequence, outcome FROM producers WHERE name = ?;

-- name: hold_producer
INSERT INTO producers (name, epoch, sequence, outcome, ephemeral, used_us)
VALUES (:name, :epoch, NULL, NULL, :ephemeral, :now)
ON CONFLICT (name) DO UPDATE SET epoch = :epoch, ephemeral = min(ephemeral, :ephemeral),
  used_us = :now;

-- name: save_producer
UPDATE producers SET sequence = ?, outcome = ?, used_us = ? WHERE name = ?;

-- name: forget_producers
DELETE FROM producers WHERE ephemeral = 1 AND used_us < ?;

-- name: insert_piece
INSERT INTO pieces
  (blob_id, producer, epoch, sequence, stream_id, partition, partitions, rows, bytes, checksum)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: piece
SELECT producer, epoch, sequence, stream_id, partition, partitions, rows, bytes, checksum
FROM pieces WHERE blob_id = ?;

-- name: delete_piece
DELETE FROM pieces WHERE blob_id = ?;

-- name: orphaned_pieces
-- Staged by a holder that was fenced, for a commit that has happened, or for a dropped stream.
SELECT p.blob_id FROM pieces AS p LEFT JOIN producers AS h ON h.name = p.producer
WHERE h.name IS NULL OR h.epoch > p.epoch OR h.sequence >= p.sequence
   OR NOT EXISTS (SELECT 1 FROM streams WHERE id = p.stream_id)
LIMIT ?;

-- name: progress
SELECT value FROM progress WHERE key = ?;

-- name: progress_items
SELECT key, value FROM progress WHERE key >= :prefix AND key < :prefix || char(1114111)
ORDER BY key;

-- name: save_progress
INSERT INTO progress (key, value) VALUES (?, ?)
ON CONFLICT (key) DO UPDATE SET value = excluded.value;

-- name: delete_progress
DELETE FROM progress WHERE key = ?;

-- name: save_entry
INSERT INTO entries (stream_id, key, value, partition, "offset", commit_number)
VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT (stream_id, key) DO UPDATE SET value = excluded.value,
  partition = excluded.partition, "offset" = excluded."offset",
  commit_number = excluded.commit_number;

-- name: delete_entry
DELETE FROM entries WHERE stream_id = ? AND key = ?;

-- name: keep_entry
INSERT OR IGNORE INTO old_entries
  (stream_id, key, commit_number, until, value, partition, "offset")
SELECT stream_id, key, commit_number, ?, value, partition, "offset" FROM entries
WHERE stream_id = ? AND key = ?;

-- name: entries_of
SELECT e.key, e.commit_number, e.value, e.partition, e."offset"
FROM carray(?) AS wanted CROSS JOIN entries AS e ON e.stream_id = ? AND e.key = wanted.value;

-- name: entry_offset
SELECT "offset" FROM entries WHERE stream_id = ? AND key = ?;

-- name: old_entry
SELECT value, partition, "offset" FROM old_entries
WHERE stream_id = :stream AND key = :key AND commit_number <= :commit AND until > :commit;

-- name: entries_after
SELECT key, value, partition, "offset" FROM entries
WHERE stream_id = ? AND key > ? ORDER BY key LIMIT ?;

-- name: entries_after_at
SELECT key, value, partition, "offset" FROM entries
WHERE stream_id = :stream AND key > :after AND commit_number <= :commit
UNION ALL
SELECT key, value, partition, "offset" FROM old_entries
WHERE stream_id = :stream AND key > :after AND commit_number <= :commit AND until > :commit
ORDER BY key LIMIT :limit;

-- name: insert_pin
INSERT INTO pins (commit_number, expires_us) VALUES (?, ?) RETURNING token;

-- name: delete_pin
DELETE FROM pins WHERE token = ?;

-- name: pin
-- By the log's own time, which never goes back: the same that writers look at.
SELECT p.commit_number FROM pins AS p, state AS s
WHERE p.token = ? AND p.expires_us > max(?, s.time_us);

-- name: oldest_pin
SELECT min(commit_number) FROM pins WHERE expires_us > ?;

-- name: expire_pins
DELETE FROM pins WHERE expires_us <= ?;

-- name: forget_old_entries
DELETE FROM old_entries WHERE until <= ?;

-- name: claim_maintenance
UPDATE state SET maintained_us = :now
WHERE maintained_us <= :now - :interval OR maintained_us > :now;

-- name: partitions_to_merge
SELECT stream_id, partition, merged_to FROM partitions WHERE unmerged >= ?;

-- name: merge_looked
UPDATE partitions SET unmerged = ?, merged_to = ? WHERE stream_id = ? AND partition = ?;

-- name: partition_bytes
SELECT bytes FROM partitions WHERE stream_id = ? AND partition = ?;

-- name: retention_moved
UPDATE partitions SET first_offset = ?, bytes = bytes - ?, merged_to = max(merged_to, ?)
WHERE stream_id = ? AND partition = ?;

-- name: bytes_changed
UPDATE partitions SET bytes = bytes + ? WHERE stream_id = ? AND partition = ?;
