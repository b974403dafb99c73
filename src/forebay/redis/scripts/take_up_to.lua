-- Charges one limiter as many permits as there are, up to a number.
--
-- KEYS: the key of its state. ARGV: the most permits; the algorithm's name; its arguments for a request of one permit.
-- Reply: the number of permits charged, and the time; -1 and 1 if the key holds a foreign value.
local algorithm, a, now = algorithms[ARGV[2]], {}, clock()
for i = 3, #ARGV do
  a[i - 2] = tonumber(ARGV[i])
end
local state = algorithm.read(KEYS[1], now, a)
if not state then
  return {-1, 1}
end
local count = math.min(tonumber(ARGV[1]), algorithm.left(state, now, a))
if count <= 0 then
  return {0, now}
end
a[1] = algorithm.amount and algorithm.amount(count, a) or count
algorithm.charge(state, now, a)
algorithm.write(KEYS[1], state, now, a)
return {count, now}
