-- Giving permits back, or letting their leases begin anew.
--
-- KEYS: the one of the limiter's state.
-- ARGV: "release" or "renew"; the lease; then the permits.
-- The answer: how many of them were held, or -1 and the number of a key that holds something else; and the time.
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
end
return {held, now}
