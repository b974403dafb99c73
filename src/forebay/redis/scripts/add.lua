-- Gives a key permits, also above its limit.
--
-- KEYS: the key of its state. ARGV: how many permits; the most that it may have above its limit; its limit; the
-- algorithm's name; its arguments for a request of one permit.
-- Reply: how many permits are left, and the time; -2 and the time if there would be too many, and none was added; -1 and
-- 1 if the key holds a foreign value.
local algorithm, a, now = algorithms[ARGV[4]], {}, clock()
for i = 5, #ARGV do
  a[i - 4] = tonumber(ARGV[i])
end
local state = algorithm.read(KEYS[1], now, a)
if not state then
  return {-1, 1}
end
algorithm.add(state, now, a, tonumber(ARGV[1]))
local left = algorithm.left(state, now, a)
if left - tonumber(ARGV[3]) > tonumber(ARGV[2]) then
  return {-2, now}
end
algorithm.write(KEYS[1], state, now, a)
return {left, now}
