-- Carries what a key has used over to another limit.
--
-- KEYS: the key of the limiter's state. ARGV: what stays the same (permits, share or used); the limit before and now; for
-- a bucket the tolerance before, and how many permits came in how much time, for others three zeros; the algorithm's
-- name; its arguments for a request of one permit.
-- Reply: how many permits are left, and the time; -1 and 1 if the key holds a foreign value.
local algorithm, a, now = algorithms[ARGV[7]], {}, clock()
for i = 8, #ARGV do
  a[i - 7] = tonumber(ARGV[i])
end
local old = {limit = tonumber(ARGV[2]), tolerance = tonumber(ARGV[4])}
old.permits, old.period = tonumber(ARGV[5]), tonumber(ARGV[6])
local state = algorithm.read(KEYS[1], now, a)
if not state then
  return {-1, 1}
end
if algorithm.convert(state, now, a, ARGV[1], old, tonumber(ARGV[3])) then
  algorithm.write(KEYS[1], state, now, a)
end
return {math.max(algorithm.left(state, now, a), 0), now}
