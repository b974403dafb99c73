-- What all algorithms share. Numbers are whole and below 2^53, so that a double holds them exactly.
--
-- An algorithm is a table of functions over a state: what is under a key, read once, and written once at the most.
--   arguments                 how many a limiter brings: a. The first is the amount, what a request adds to the state;
--                             the second the room there may be before, or of a cancellation what the charge had left
--   read(key, now, a)         the state; nil if what is there isn't one
--   allows(state, now, a)     whether the request may pass
--   charge(state, now, a)     changes the state, not yet Redis
--   tell(state, now, a, ok)   whole numbers for the caller; ok: whether the request may pass
--   write(key, state, now, a)
--   used(state, now, a)       of a window, how many permits of it
--   give_back(key, state, now, a, is_cancelled)   takes a charge back, in Redis
local algorithms = {}

local function text(number)
  return string.format('%.0f', number)
end

-- a * b / c, rounded down, and the rest: exact, also where the product would be too large for a double. b and c are below
-- 2^49, and the result below 2^53.
local function scaled(a, b, c)
  if a * b < 9007199254740992 then
    local whole = math.floor(a * b / c)
    return whole, a * b - whole * c
  end
  local digits, whole, rest = {}, 0, 0
  while a > 0 do
    digits[#digits + 1] = a % 8
    a = math.floor(a / 8)
  end
  for i = #digits, 1, -1 do
    rest = rest * 8 + digits[i] * b
    whole = whole * 8 + math.floor(rest / c)
    rest = rest % c
  end
  return whole, rest
end

-- What Redis answers; nil if the key holds another type of value.
local function ask(...)
  local answer = redis.pcall(...)
  if type(answer) == 'table' and answer.err then
    if string.find(answer.err, 'WRONGTYPE', 1, true) then
      return nil
    end
    error(answer.err, 0)
  end
  return answer
end

-- The numbers that a pattern finds in a text; nil if it doesn't, or finds one that no double holds.
local function numbers(value, pattern)
  local found = {string.match(value, pattern)}
  if #found == 0 then
    return nil
  end
  for i, digits in ipairs(found) do
    found[i] = tonumber(digits)
    if found[i] >= 9007199254740992 then
      return nil
    end
  end
  return found
end

-- Whether a member's score can be a time of ours.
local function is_time(score)
  return score % 1 == 0 and score >= 0 and score < 9007199254740992
end

-- A state that is a few numbers in one text.
local function read_text(key, pattern, fresh)
  local value = ask('GET', key)
  if value == false then
    return fresh
  end
  return value and numbers(value, pattern)
end

local function write_text(key, value, until_us, now)
  if until_us > now then
    redis.call('SET', key, value, 'PXAT', expiry(until_us))
  else
    redis.call('UNLINK', key)
  end
end
