-- Fixed window. The state is the window's end and its count.
algorithms.fixed = {
  arguments = 4, -- amount, room, period, phase: that of all windows, or -1 if one begins with a key's first request
  read = function(key, now, a)
    local state = read_text(key, '^w(%d+):(%d+)$', {0, 0})
    -- The clock may be behind a window that was written before: use that window.
    if state and state[1] <= now then
      local period, phase = a[3], a[4]
      state[1] = phase < 0 and now + period or now - (now - phase) % period + period
      state[2] = 0
    end
    return state
  end,
  used = function(state)
    return state[2]
  end,
  allows = function(state, now, a)
    return state[2] <= a[2]
  end,
  left = function(state, now, a)
    return a[1] + a[2] - state[2]
  end,
  convert = function(state, now, a, keep, old, limit)
    if state[2] > 0 then
      state[2] = converted(state[2], keep, old.limit, limit)
      return true
    end
  end,
  charge = function(state, now, a)
    state[2] = state[2] + a[1]
  end,
  report = function(state)
    return state
  end,
  write = function(key, state, now)
    write_text(key, 'w' .. text(state[1]) .. ':' .. text(state[2]), state[1], now)
  end,
  give_back = function(key, state, now, a, is_cancelled)
    if state[2] == 0 or is_cancelled and state[1] ~= a[2] then
      return
    end
    state[2] = math.max(state[2] - a[1], 0)
    if state[2] == 0 and a[4] >= 0 then
      redis.call('UNLINK', key)
    else
      -- A window that began with a request keeps its end: earlier replies have reported it.
      algorithms.fixed.write(key, state, now)
    end
  end,
}
