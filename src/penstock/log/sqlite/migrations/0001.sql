-- Format 1 of the embedded log. Times are microseconds since 1970 (UTC).

CREATE TABLE state (
  one            INTEGER PRIMARY KEY CHECK (one = 1),
  log_id         TEXT NOT NULL,
  commit_number  INTEGER NOT NULL,  -- of the latest commit
  epoch          INTEGER NOT NULL,  -- the latest that any holder got
  time_us        INTEGER NOT NULL,  -- of the latest append; never goes back
  maintained_us  INTEGER NOT NULL   -- when some process last looked after the log
) STRICT;

CREATE TABLE namespaces (
  name        TEXT PRIMARY KEY,
  created_us  INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE streams (
  id          INTEGER PRIMARY KEY AUTOINCREMENT,
  namespace   TEXT NOT NULL REFERENCES namespaces (name),
  name        TEXT NOT NULL,
  spec        TEXT NOT NULL,     -- StreamSpec as JSON
  grown       TEXT NOT NULL,     -- every number of partitions it has had, as JSON
  created_us  INTEGER NOT NULL,
  version     INTEGER NOT NULL,
  seal        INTEGER NOT NULL,  -- checksum over the declaration and its records
  UNIQUE (namespace, name)
) STRICT;

CREATE TABLE records (
  stream_id  INTEGER NOT NULL REFERENCES streams (id) ON DELETE CASCADE,
  version    INTEGER NOT NULL,
  schema     TEXT NOT NULL,
  PRIMARY KEY (stream_id, version)
) STRICT, WITHOUT ROWID;

CREATE TABLE partitions (
  stream_id     INTEGER NOT NULL REFERENCES streams (id) ON DELETE CASCADE,
  partition     INTEGER NOT NULL,
  first_offset  INTEGER NOT NULL,
  next_offset   INTEGER NOT NULL,
  bytes         INTEGER NOT NULL,
  unmerged      INTEGER NOT NULL,  -- batches added since merging last looked
  merged_to     INTEGER NOT NULL,  -- offsets below are in batches that are large enough
  PRIMARY KEY (stream_id, partition)
) STRICT, WITHOUT ROWID;

-- What was appended or staged. A commit never moves it: it only adds to batches.
CREATE TABLE blobs (
  id    INTEGER PRIMARY KEY AUTOINCREMENT,
  data  BLOB NOT NULL
) STRICT;

-- The offset index: which blob holds which offsets. Only what is here is visible.
CREATE TABLE batches (
  stream_id      INTEGER NOT NULL REFERENCES streams (id) ON DELETE CASCADE,
  partition      INTEGER NOT NULL,
  first_offset   INTEGER NOT NULL,
  rows           INTEGER NOT NULL,
  blob_id        INTEGER NOT NULL,
  bytes          INTEGER NOT NULL,
  checksum       INTEGER NOT NULL,  -- of the blob
  commit_number  INTEGER NOT NULL,  -- of the first row
  time_us        INTEGER NOT NULL,  -- of the last row's append
  runs           BLOB,              -- of a merged batch: which rows were committed when
  seal           INTEGER NOT NULL,  -- checksum over this very row
  PRIMARY KEY (stream_id, partition, first_offset)
) STRICT, WITHOUT ROWID;
CREATE INDEX batches_by_time ON batches (stream_id, partition, time_us);

CREATE TABLE producers (
  name       TEXT PRIMARY KEY,
  epoch      INTEGER NOT NULL,
  sequence   INTEGER,             -- of the latest commit
  outcome    BLOB,                -- Committed, as msgpack
  ephemeral  INTEGER NOT NULL,
  used_us    INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- Staged blobs that no commit has named yet.
CREATE TABLE pieces (
  blob_id     INTEGER PRIMARY KEY,
  producer    TEXT NOT NULL,
  epoch       INTEGER NOT NULL,
  sequence    INTEGER NOT NULL,
  stream_id   INTEGER NOT NULL,
  partition   INTEGER NOT NULL,
  partitions  INTEGER NOT NULL,
  rows        INTEGER NOT NULL,
  bytes       INTEGER NOT NULL,
  checksum    INTEGER NOT NULL
) STRICT;

CREATE TABLE progress (
  key    TEXT PRIMARY KEY,
  value  BLOB NOT NULL
) STRICT, WITHOUT ROWID;

-- The ids that an ids="producer" stream holds: integers as ranges, others one by one.
CREATE TABLE id_ranges (
  stream_id  INTEGER NOT NULL REFERENCES streams (id) ON DELETE CASCADE,
  first      INTEGER NOT NULL,
  last       INTEGER NOT NULL,
  PRIMARY KEY (stream_id, first)
) STRICT, WITHOUT ROWID;
CREATE TABLE ids (
  stream_id  INTEGER NOT NULL REFERENCES streams (id) ON DELETE CASCADE,
  id         TEXT NOT NULL,
  time_us    INTEGER NOT NULL,
  PRIMARY KEY (stream_id, id)
) STRICT, WITHOUT ROWID;

-- The latest value per key of every table, and what pinned readers still need of older ones.
CREATE TABLE entries (
  stream_id      INTEGER NOT NULL REFERENCES streams (id) ON DELETE CASCADE,
  key            BLOB NOT NULL,
  value          BLOB NOT NULL,
  partition      INTEGER NOT NULL,
  "offset"       INTEGER NOT NULL,
  commit_number  INTEGER NOT NULL,
  PRIMARY KEY (stream_id, key)
) STRICT, WITHOUT ROWID;
CREATE TABLE old_entries (
  stream_id      INTEGER NOT NULL REFERENCES streams (id) ON DELETE CASCADE,
  key            BLOB NOT NULL,
  commit_number  INTEGER NOT NULL,
  until          INTEGER NOT NULL,  -- the commit that replaced it
  value          BLOB NOT NULL,
  partition      INTEGER NOT NULL,
  "offset"       INTEGER NOT NULL,
  PRIMARY KEY (stream_id, key, commit_number)
) STRICT, WITHOUT ROWID;
CREATE TABLE pins (
  token          INTEGER PRIMARY KEY AUTOINCREMENT,
  commit_number  INTEGER NOT NULL,
  expires_us     INTEGER NOT NULL
) STRICT;
