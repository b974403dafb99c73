-- Releases permits of a `Concurrency` key, or renews their leases.
--
-- KEYS: the key of the limiter's state; for permits that a request with an id has taken, the key of its mark.
-- ARGV: "release" or "renew"; the lease's length; then the permits' names.
-- Reply: how many of these permits were held, and the time. Or -1 and 1 if the key holds a foreign value.
local now, held = clock(), 0
local state = algorithms.concurrency.read(KEYS[1], now)
if not state then
  return {-1, 1}
end
local ends = now + ARGV[2]
for i = 3, #ARGV do
  local score = redis.call('ZSCORE', KEYS[1], ARGV[i])
  if score and tonumber(score) > now then
    held = held + 1
    if ARGV[1] == 'renew' then
      redis.call('ZADD', KEYS[1], text(ends), ARGV[i])
    else
      redis.call('ZREM', KEYS[1], ARGV[i])
    end
  end
end
if held > 0 and ARGV[1] == 'renew' then
  redis.call('PEXPIREAT', KEYS[1], expiry(math.max(state.last_end, ends)))
  if KEYS[2] and reply_of('GET', KEYS[2]) == string.match(ARGV[3], '^h%x+') then
    redis.call('PEXPIREAT', KEYS[2], expiry(ends))
  end
end
return {held, now}
