-- Sliding window. The state is the end of the current window, the count of the window before, and the current count.
-- The weighted count of the window before is rounded up or down; limiters that round differently share the state.

algorithms.sliding = {
  arguments = 4, -- amount, room, period, 1 to round up
  read = function(key, now, a)
    local state, period = read_text(key, '^s(%d+):(%d+):(%d+)$', {0, 0, 0}), a[3]
    local ends = now - now % period + period
    -- The clock may be behind a window that was written before: use that window.
    if state and state[1] < ends then
      return {ends, state[1] == ends - period and state[3] or 0, 0, written = state[1]}
    end
    return state
  end,
  used = function(state, now, a)
    local before, rest = scaled(state[2], math.min(state[1] - now, a[3]), a[3])
    return state[3] + before + (rest > 0 and a[4] or 0)
  end,
  allows = function(state, now, a)
    return algorithms.sliding.used(state, now, a) <= a[2]
  end,
  left = function(state, now, a)
    return a[1] + a[2] - algorithms.sliding.used(state, now, a)
  end,
  convert = function(state, now, a, keep, old, limit)
    local used = algorithms.sliding.used(state, now, a)
    if used == 0 then
      return false
    end
    if keep == 'share' then
      state[2] = scaled_up(state[2], limit, old.limit)
      state[3] = scaled_up(state[3], limit, old.limit)
      return true
    end
    local part, left = used - state[3], math.min(state[1] - now, a[3])
    used = converted(used, keep, old.limit, limit)
    state[3] = math.max(used - part, 0)
    if part > used then
      -- The most of the window before whose part now is `used`.
      local most = a[4] == 1 and (scaled(used, a[3], left)) or scaled_up(used + 1, a[3], left) - 1
      state[2] = math.min(state[2], most)
    end
    return true
  end,
  charge = function(state, now, a)
    state[3] = state[3] + a[1]
  end,
  report = function(state)
    return state
  end,
  write = function(key, state, now, a)
    local ends, before, count = state[1], state[2], state[3]
    local until_us = count > 0 and ends + a[3] or before > 0 and ends or now
    write_text(key, 's' .. text(ends) .. ':' .. text(before) .. ':' .. text(count), until_us, now)
  end,
  give_back = function(key, state, now, a, is_cancelled)
    local from_count = math.min(a[1], state[3])
    local from_before = math.min(a[1] - from_count, state[2])
    -- After a charge in a later window, an earlier charge can't be distinguished from other requests' charges.
    if from_count + from_before == 0 or is_cancelled and (state.written or state[1]) ~= a[2] then
      return
    end
    state[2], state[3] = state[2] - from_before, state[3] - from_count
    algorithms.sliding.write(key, state, now, a)
  end,
}
