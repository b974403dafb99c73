-- The generic cell rate algorithm. The state is the theoretical arrival time (TAT). Or, as a negative number, how many
-- permits more than the burst the key has: then nothing is refilled, and the state needs no time.
algorithms.gcra = {
  -- amount, room, due, and the rate: so many permits, per so much time. Due: a TAT at most so far ahead of now has no
  -- booking that is still waiting
  arguments = 5,
  read = function(key)
    local value = reply_of('GET', key)
    if value == false then
      return {0}
    end
    local above = value and numbers(value, '^a(%d+)$')
    return above and {-above[1]} or value and numbers(value, '^t(%d+)$')
  end,
  allows = function(state, now, a)
    return math.max(state[1], now) - now <= a[2]
  end,
  charge = function(state, now, a)
    if state[1] < 0 then
      local permits, above = scaled(a[1], a[4], a[5]), -state[1]
      state[1] = permits < above and permits - above or now + scaled_up(permits - above, a[5], a[4])
    else
      state[1] = math.max(state[1], now) + a[1]
    end
  end,
  report = function(state)
    return state
  end,
  left = function(state, now, a)
    local left = a[1] + a[2] - math.max(state[1] - now, 0)
    return left > 0 and scaled(left, a[4], a[5]) - math.min(state[1], 0) or 0
  end,
  add = function(state, now, a, permits)
    if state[1] < 0 then
      permits = permits - state[1]
    elseif state[1] > now then
      -- As many permits fill the bucket; the last one perhaps in part.
      local time = scaled(permits, a[5], a[4])
      if state[1] - now > time then
        state[1] = state[1] - time
        return
      end
      permits = permits - scaled_up(state[1] - now, a[4], a[5])
    end
    state[1] = permits > 0 and -permits or now
  end,
  amount = function(permits, a)
    return scaled_up(permits, a[5], a[4])
  end,
  convert = function(state, now, a, keep, old, limit)
    local ahead, tolerance, most = state[1] - now, a[1] + a[2], 2251799813685248
    if ahead <= 0 then
      return false
    end
    local function later(value, by, divisor)
      return value * by / divisor < most and scaled_up(value, by, divisor) or most
    end
    if keep == 'share' then
      ahead = later(ahead, tolerance, old.tolerance)
    elseif keep == 'used' then
      ahead = later(later(ahead, old.permits, old.period), a[5], a[4])
    elseif ahead > old.tolerance then
      -- Booked ahead.
      ahead = math.min(tolerance + later(later(ahead - old.tolerance, old.permits, old.period), a[5], a[4]), most)
    else
      local left = math.min((scaled(old.tolerance - ahead, old.permits, old.period)), limit)
      ahead = tolerance - math.min(scaled_up(left, a[5], a[4]), tolerance)
    end
    state[1] = now + ahead
    return true
  end,
  write = function(key, state, now)
    if state[1] < 0 then
      redis.call('SET', key, 'a' .. text(-state[1]))
    else
      write_text(key, 't' .. text(state[1]), state[1], now)
    end
  end,
  give_back = function(key, state, now, a, is_cancelled)
    local amount, charged = a[1], a[2]
    if is_cancelled and charged < 0 then
      -- The part that it charged above the burst goes back there, if the key still has more permits than its burst.
      if state[1] < 0 then
        state[1] = math.max(state[1] - scaled(amount, a[4], a[5]), -281474976710655) -- as many as `add` gives
        algorithms.gcra.write(key, state, now)
      end
      return
    end
    if is_cancelled then
      -- Later bookings keep their times, so no request can use the cancelled one's.
      if charged ~= state[1] and state[1] - now > a[3] then
        return
      end
      -- The rest of the charge has been refilled.
      amount = math.min(amount, charged - now)
    end
    if state[1] > now and amount > 0 then
      state[1] = math.max(state[1] - amount, now)
      algorithms.gcra.write(key, state, now)
    end
  end,
}
