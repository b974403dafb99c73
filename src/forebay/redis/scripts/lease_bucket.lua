-- A token bucket that lends permits to hosts.
--
-- State: the theoretical arrival time (TAT), in which borrowed permits are charged; and each host's loan: the permits,
-- the end of its lease, and when the host began the request (by its own clock).
--
-- Transitions: `borrow` replaces the host's loan by what the host reports as left, and adds what is granted. `charge`
-- moves the TAT and changes no loan, so it needs no order with a host's other requests. The end of a lease turns its
-- loan into spent permits. `reset` deletes the state.
--
-- Invariant: the permits missing in the bucket are at least those on loan. The loan counts as missing until the host
-- reports it as spent or its lease ends.
--
-- Proof: in a span from s to t, hosts spend at most what they had on loan at s and what they borrow until t: level(s) +
-- on_loan(s) + rate * (t - s). By the invariant this is at most the burst plus the refill of the span. A charge equals
-- a borrow by a host without a loan that reports all of it as spent at the same moment: the level falls, the loans
-- stay. So the bound holds for charges too, if they count as spent then, as those of strict limiters do. The process
-- that sent the charge uses it within its deadline d or never. So a span of length t admits no more than a span of
-- length t + d.
--
-- Crash and stall: a request that arrives after a later one of its host is detected by its begin time. It changes no
-- loan; only its refund is given back. A host that has lost its lease's cell reports -1: its loan stays until its end.
--
-- Not handled: a state that Redis loses. The permits that the hosts have left then have no loan. The reply has the
-- number of reported permits that the host must drop.
--
-- KEYS: the state's key.
-- ARGV: limit and period of the rate; tolerance; the operation; then for
--   borrow   host; when it began the request; the permits that it has left, or -1 if unknown; the permits that it gives
--            back; the least it needs; the most it wants; the lease's length; permits to refund
--   charge   permits
--   peek     permits
--   reset    nothing
-- Reply: 1 granted, 0 not, 2 overtaken by a later request of the host; the time; permits granted; how long the lease
-- lasts; after how long the least can be had or, if fewer than the most were granted, any permit; and how many of the
-- reported permits have no loan. These were charged as spent at their lease's end, or their state was lost. The host
-- drops them.
local key, limit, period, tolerance = KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local now = clock()

-- The refill time of so many permits, rounded up, and rounded down.
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
  local value = reply_of('GET', key)
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
    state.loans[#state.loans + 1] = {host = host, permits = loan[1], ends = loan[2], stamp = loan[3]}
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

-- Applies the time that has passed: leases that have ended, and the refill.
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

-- How long until so many permits can be had, if no other request comes before.
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
    local times = text(loan.ends) .. ':' .. text(loan.stamp)
    parts[#parts + 1] = ';' .. loan.host .. ':' .. text(loan.permits) .. ':' .. times
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
local host, stamp, left, unspent = ARGV[5], tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local need, want, lease, undone = tonumber(ARGV[9]), tonumber(ARGV[10]), tonumber(ARGV[11]), tonumber(ARGV[12])
local own
for i, loan in ipairs(state.loans) do
  if loan.host == host then
    own = loan
    table.remove(state.loans, i)
    break
  end
end
if own and stamp <= own.stamp then
  state.loans[#state.loans + 1] = own
  give_back(state, undone)
  write(state)
  return {2, now, 0, 0, 0, 0}
end
own = own or {host = host, permits = 0, ends = now + lease}
own.stamp = stamp
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
