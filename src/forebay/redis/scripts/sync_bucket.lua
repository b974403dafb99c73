-- A host reports what it has charged to a bucket, in microseconds of refill. The sum is the theoretical arrival time
-- (TAT) of all hosts together.
--
-- KEYS: the hash; and the hot list of its shard. ARGV: the host; the key's incarnation there; when the host read its
-- count; what it has charged in this incarnation; how much of that the host believes Redis to know; how long ago it
-- last reported; and how far ahead of now the sum of a hot key is.
-- Reply: 1; the time; how far the sum is ahead of it; and what Redis knows of this host. Or -1 and the index of a key
-- that holds a foreign value.
local GRACE = 60000000 -- how long a host's last report is kept after the bucket is full
local host, incarnation, read_at = ARGV[1], ARGV[2], tonumber(ARGV[3])
local charged, believed, silence = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local share = tonumber(ARGV[7])
local key, list, now = KEYS[1], KEYS[2], clock()
local report, score = read_report(key, host, incarnation), read_score(list, key)
if not report then
  return {-1, 1}
end
if score == nil then
  return {-1, 2}
end
-- Evicts the host whose report is the oldest to make room for a new host. When the evicted host reports again, the
-- count that it believes to be known replaces its entry.
local function make_room()
  local fields, oldest, oldest_at = redis.call('HGETALL', key), nil, nil
  for i = 1, #fields, 2 do
    local at = tonumber(string.match(fields[i + 1], ':(%d+)$'))
    if fields[i] ~= 'sum' and at and (not oldest or at < oldest_at) then
      oldest, oldest_at = fields[i], at
    end
  end
  if oldest then
    redis.call('HDEL', key, oldest)
  end
end

local published, is_refund = score and tonumber(score) or 0, false
if read_at > report.read then
  -- A count may fall only within a known incarnation. The sum contains no report of an unknown one, so nothing may be
  -- subtracted for it.
  local more = report.known and charged - report.known or math.max(charged - believed, 0)
  if more > 0 then
    report.sum = math.max(report.sum, now - silence) + more
  else
    report.sum = math.max(report.sum + more, 0)
    is_refund = more < 0
  end
  report.known = charged
  if not has_room(key, report) then
    make_room()
  end
  write_report(key, report, host, read_at, incarnation, charged, now, math.max(report.sum, now) + GRACE)
end
-- A sum falls by a refund only, or because Redis has lost it. Then the sum of before stays published.
if publish(list, score, key, is_refund and report.sum or math.max(report.sum, published), now + share, now) then
  -- As long as the last of its keys.
  local last = redis.call('ZRANGE', list, -1, -1, 'WITHSCORES')
  redis.call('PEXPIREAT', list, expiry(math.max(tonumber(last[2]), now) + GRACE))
end
return {1, now, math.max(report.sum - now, 0), report.known or 0}
