-- A token bucket of which permits are on loan to hosts.
--
-- What is on loan still counts as being in the bucket, until it is reported as spent or its lease is over: at every time,
-- what is missing in the bucket is at least what is on loan. So in a span from s to t, hosts spend at most what they had
-- at s and what they borrow until t: level(s) + on_loan(s) + rate * (t - s), which is at most the burst and the rate's.
--
-- What is *charged* is never on loan. It is what a host of its own would do, which has nothing, if it borrowed just as
-- much and reported at the same moment that all is spent: the level falls by so many, and on loan is what was. So the
-- above holds of it as well, if it counts as spent then: as the requests of strict limiters do. Who has asked uses it
-- within its deadline or never; so in a span of t, with a deadline of d, no more are admitted than in t + d. It changes no
-- loan, so it is in no order with a host's requests.
--
-- The state is the theoretical arrival time, by which borrowed permits have been charged, and each host's loan: the
-- permits, when the lease ends, and when the host had begun to ask (by its own clock).
--
-- KEYS: the state's key.
-- ARGV: limit and period of the rate; tolerance; what is asked; then for
--   borrow   host; when it began to ask; the permits that it has left, or -1 if it doesn't know; those that it gives back;
--            what it needs; what it wants; for how long; permits of requests that shall not count any more
--   charge   permits
--   peek     permits
--   reset    nothing
-- The answer: 1 granted, 0 not, 2 asked before a request that was here already; the time; permits granted; for how long;
-- after how long what is needed can be had, or, when less was granted than was wanted, any; and of the permits that the
-- host has left, how many don't count any more, as there is no loan of which they can be: its end has passed before this
-- came, so that they have been charged as spent; or the state was lost, and they never were. The host drops them.
local key, limit, period, tolerance = KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local now = clock()

-- The time that so many permits take, rounded up and down.
local function time_up(permits)
  local whole, rest = scaled(permits, period, limit)
  return rest > 0 and whole + 1 or whole
end

local function time_down(permits)
  return (scaled(permits, period, limit))
end

local function later(a, b)
  return a.ends < b.ends
end

local function read()
  local value = ask('GET', key)
  if value == nil then
    return nil
  end
  local state = {tat = 0, on_loan = 0, loans = {}}
  if value == false then
    return state
  end
  local tat = numbers(value, '^l(%d+)')
  local _, last = string.find(value, '^l%d+')
  while tat and last < #value do
    local first, to, host = string.find(value, '^;(%x+):%d+:%d+:%d+', last + 1)
    local loan = first and numbers(string.sub(value, first, to), '^;%x+:(%d+):(%d+):(%d+)$')
    if not loan then
      return nil
    end
    state.loans[#state.loans + 1] = {host = host, permits = loan[1], ends = loan[2], asked = loan[3]}
    state.on_loan = state.on_loan + loan[1]
    last = to
  end
  if not tat then
    return nil
  end
  state.tat = tat[1]
  table.sort(state.loans, later)
  return state
end

-- What the time since has changed.
local function move_on(state)
  while state.loans[1] and state.loans[1].ends <= now do
    local loan = table.remove(state.loans, 1)
    state.tat = math.max(state.tat, loan.ends + time_up(state.on_loan))
    state.on_loan = state.on_loan - loan.permits
  end
  state.tat = math.max(state.tat, now + time_up(state.on_loan))
end

local function give_back(state, permits)
  state.tat = math.max(state.tat - time_down(permits), now + time_up(state.on_loan))
end

local function room(state)
  return math.max(tolerance - (state.tat - now), 0)
end

-- How long until so many can be had, if nobody comes before.
local function wait_for(state, permits)
  local amount, tat, on_loan, from = time_up(permits), state.tat, state.on_loan, now
  for _, loan in ipairs(state.loans) do
    if time_up(on_loan) + amount <= tolerance and math.max(from, tat + amount - tolerance) <= loan.ends then
      break
    end
    tat, from = math.max(tat, loan.ends + time_up(on_loan)), loan.ends
    on_loan = on_loan - loan.permits
  end
  return math.max(from, tat + amount - tolerance) - now
end

local function write(state)
  local parts, until_us = {'l' .. text(state.tat)}, state.tat
  for _, loan in ipairs(state.loans) do
    parts[#parts + 1] = ';' .. loan.host .. ':' .. text(loan.permits) .. ':' .. text(loan.ends) .. ':' .. text(loan.asked)
    until_us = math.max(until_us, loan.ends)
  end
  write_text(key, table.concat(parts), until_us, now)
end

local state = read()
if not state then
  return {-1, 1}
end
move_on(state)

if ARGV[4] == 'peek' then
  local permits, free = tonumber(ARGV[5]), (scaled(room(state), limit, period))
  return {free >= permits and 1 or 0, now, free, 0, free >= permits and 0 or wait_for(state, permits), 0}
end
if ARGV[4] == 'charge' then
  local permits = tonumber(ARGV[5])
  if time_up(permits) > room(state) then
    return {0, now, 0, 0, wait_for(state, permits), 0}
  end
  state.tat = state.tat + time_up(permits)
  write(state)
  return {1, now, permits, 0, 0, 0}
end
if ARGV[4] == 'reset' then
  redis.call('UNLINK', key)
  return {1, now, 0, 0, 0, 0}
end
local host, asked, left, unspent = ARGV[5], tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local need, want, lease, undone = tonumber(ARGV[9]), tonumber(ARGV[10]), tonumber(ARGV[11]), tonumber(ARGV[12])
local own
for i, loan in ipairs(state.loans) do
  if loan.host == host then
    own = loan
    table.remove(state.loans, i)
    break
  end
end
if own and asked <= own.asked then
  state.loans[#state.loans + 1] = own
  give_back(state, undone)
  write(state)
  return {2, now, 0, 0, 0, 0}
end
own = own or {host = host, permits = 0, ends = now + lease}
own.asked = asked
local dropped = math.max(left - own.permits, 0)
if left >= 0 then
  left = left - dropped
  need = need > 0 and need + dropped or 0
  want = math.max(want, need)
  local returned = math.max(math.min(unspent, own.permits - left), 0)
  state.on_loan = state.on_loan - own.permits + left
  own.permits = left
  give_back(state, returned)
end
give_back(state, undone)

local granted = 0
if want > 0 then
  granted = time_up(want) <= room(state) and want or (scaled(room(state), limit, period))
  if granted < need then
    granted = 0
  end
end
if granted > 0 then
  state.tat = state.tat + time_up(granted)
  state.on_loan = state.on_loan + granted
  own.permits = own.permits + granted
  own.ends = now + lease
end
if own.permits > 0 then
  state.loans[#state.loans + 1] = own
  table.sort(state.loans, later)
end
write(state)
local retry = granted < want and wait_for(state, granted > 0 and 1 or need) or 0
return {granted > 0 and 1 or 0, now, granted, own.ends - now, retry, dropped}
