-- Takes permits of a `Concurrency` key for a request with an id, or releases them.
--
-- KEYS: the key of the limiter's state; the key of the request's mark, which is the name of the permits that the latest
-- request with the id has taken.
-- ARGV: "hit" or "release"; then the arguments of a request.
-- Reply to hit: as of decide.lua. Permits that the mark's name still holds move to the new name, and take no others.
-- Reply to release: how many permits were held, and the time.
-- Reply to any: -1 and the index of a key that holds a foreign value.
local concurrency, now = algorithms.concurrency, clock()
local a = {tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]}
local state, name = concurrency.read(KEYS[1], now), reply_of('GET', KEYS[2])
if not state then
  return {-1, 1}
elseif name == nil or name and not string.match(name, '^h%x+$') then
  return {-1, 2}
end
local held = {}
for i = 1, name and a[1] or 0 do
  local score = redis.call('ZSCORE', KEYS[1], name .. ':' .. text(i))
  if score and tonumber(score) > now then
    held[#held + 1] = name .. ':' .. text(i)
  end
end
if ARGV[1] == 'release' then
  for _, permit in ipairs(held) do
    redis.call('ZREM', KEYS[1], permit)
  end
  redis.call('UNLINK', KEYS[2])
  return {#held, now}
end

-- Permits of which some were released are left to the earlier request.
local moves = #held == a[1]
state.used = state.used - (moves and #held or 0)
local ok = concurrency.allows(state, now, a)
if ok then
  concurrency.charge(state, now, a)
  concurrency.write(KEYS[1], state, now)
  for _, permit in ipairs(moves and held or {}) do
    redis.call('ZREM', KEYS[1], permit)
  end
  redis.call('SET', KEYS[2], a[4], 'PXAT', expiry(now + a[3]))
end
return {ok and 1 or 0, now, ok and 1 or 0, unpack(concurrency.report(state, now, a, ok, KEYS[1]))}
