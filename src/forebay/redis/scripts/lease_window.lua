-- A window that lends permits to hosts. A borrow is charged at once, in the same state that strict limiters use. The
-- host drops the remaining permits at the window's end, so every permit is spent in the window in which it was charged.
--
-- KEYS: the state's key.
-- ARGV: "borrow" or "peek"; the least needed; the most wanted; the name of the algorithm and its arguments.
-- Reply: 1 granted or 0 not; the time; permits granted, or for a peek those available; then the numbers of the
-- algorithm's `report`.
local need, want, algorithm, a = tonumber(ARGV[2]), tonumber(ARGV[3]), algorithms[ARGV[4]], {}
for i = 1, algorithm.arguments do
  a[i] = tonumber(ARGV[4 + i])
end
local now = clock()
local state = algorithm.read(KEYS[1], now, a)
if not state then
  return {-1, 1}
end
local granted = math.max(a[1] + a[2] - algorithm.used(state, now, a), 0)
if ARGV[1] == 'borrow' then
  granted = math.min(granted, want)
  if granted < need then
    granted = 0
  end
  if granted > 0 then
    a[1] = granted
    algorithm.charge(state, now, a)
    algorithm.write(KEYS[1], state, now, a)
  end
end
local answer = {granted > 0 and granted >= need and 1 or 0, now, granted}
for _, number in ipairs(algorithm.report(state, now, a)) do
  answer[#answer + 1] = number
end
return answer
