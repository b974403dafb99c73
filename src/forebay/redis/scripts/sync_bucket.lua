-- What a host has charged to a bucket, in microseconds of refill. The sum is the theoretical arrival time of all hosts.
--
-- KEYS: the hash. ARGV: the host, the key's birth there, when this was read, what was charged since that birth, what of it
-- the host believes to be known, and for how long it hasn't told anything.
-- The answer: 1 and the time, how far the sum is ahead of it, and what is known of this host. Or -1 and 1 if the key holds
-- something else.
local GRACE = 60000000 -- how long a host's last message is kept after the bucket is full
local host, birth, read_at = ARGV[1], ARGV[2], tonumber(ARGV[3])
local charged, believed, silence = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local key, now = KEYS[1], clock()
local told = read_told(key, host, birth)
if not told then
  return {-1, 1}
end
-- Who was heard of least recently makes room for a host that is new, and is known again by what it believes.
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

if read_at > told.read then
  -- Of a birth that isn't known, nothing was told that could be taken back.
  local more = told.known and charged - told.known or math.max(charged - believed, 0)
  if more > 0 then
    told.sum = math.max(told.sum, now - silence) + more
  else
    told.sum = math.max(told.sum + more, 0)
  end
  told.known = charged
  if not has_room(key, told) then
    make_room()
  end
  write_told(key, told, host, read_at, birth, charged, now, math.max(told.sum, now) + GRACE)
end
return {1, now, math.max(told.sum - now, 0), told.known or 0}
