-- name: ranges_touching
-- Ranges that overlap [low, high] or lie directly beside it.
SELECT first, last FROM id_ranges
WHERE stream_id = :stream AND first <= :high AND last >= :low
  AND first >= coalesce(
    (SELECT first FROM id_ranges WHERE stream_id = :stream AND first <= :low
     ORDER BY first DESC LIMIT 1), :low)
ORDER BY first;

-- name: delete_range
DELETE FROM id_ranges WHERE stream_id = ? AND first = ?;

-- name: insert_range
INSERT INTO id_ranges (stream_id, first, last) VALUES (?, ?, ?);

-- name: has_id
SELECT 1 FROM ids WHERE stream_id = ? AND id = ?;

-- name: insert_id
INSERT INTO ids (stream_id, id, time_us) VALUES (?, ?, ?);

-- name: forget_ids
DELETE FROM ids WHERE stream_id = ? AND time_us < ?;
