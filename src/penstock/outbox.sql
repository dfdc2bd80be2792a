-- name: create_sqlite
CREATE TABLE IF NOT EXISTS penstock_outbox (
  id       INTEGER PRIMARY KEY AUTOINCREMENT,
  stream   TEXT NOT NULL,
  data     BLOB NOT NULL,
  kind     TEXT NOT NULL,
  key      BLOB,
  time_us  INTEGER NOT NULL,
  headers  TEXT
);

-- name: create_postgresql
CREATE TABLE IF NOT EXISTS penstock_outbox (
  id       BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  stream   TEXT NOT NULL,
  data     BYTEA NOT NULL,
  kind     TEXT NOT NULL,
  key      BYTEA,
  time_us  BIGINT NOT NULL,
  headers  TEXT
);

-- name: create_origin
-- Tells this outbox from others, whose numbers are the same.
CREATE TABLE IF NOT EXISTS penstock_outbox_origin (origin TEXT NOT NULL);

-- name: origin
SELECT origin FROM penstock_outbox_origin;

-- name: save_origin
INSERT INTO penstock_outbox_origin (origin) VALUES (:origin);

-- name: wait_for_others
-- Until this transaction ends.
SELECT pg_advisory_xact_lock(hashtext('penstock_outbox'));

-- name: add
INSERT INTO penstock_outbox (stream, data, kind, key, time_us, headers)
VALUES (:stream, :data, :kind, :key, :time_us, :headers)
RETURNING id;

-- name: waiting
SELECT id, stream, data, kind, key, time_us, headers
FROM penstock_outbox ORDER BY id LIMIT :rows;

-- name: delete_sqlite
DELETE FROM penstock_outbox WHERE id IN (SELECT value FROM json_each(:ids));

-- name: delete_postgresql
DELETE FROM penstock_outbox
WHERE id IN (
  SELECT CAST(value AS BIGINT) FROM json_array_elements_text(CAST(:ids AS JSON)) AS gone (value)
);
