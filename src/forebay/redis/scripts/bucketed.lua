-- Bucketed window. The state is a hash: the number of each bucket with a charge, and its count.
algorithms.bucketed = {
  arguments = 4, -- amount, room, buckets, a bucket's length
  read = function(key, now, a)
    local fields = reply_of('HGETALL', key)
    if not fields then
      return nil
    end
    local state = {counts = {}, old = {}, last = -1, newest = math.floor(now / a[4])}
    for i = 1, #fields, 2 do
      local bucket, count = numbers(fields[i], '^b(%d+)$'), numbers(fields[i + 1], '^(%d+)$')
      if not (bucket and count) then
        return nil
      end
      state.counts[bucket[1]] = count[1]
      state.last = math.max(state.last, bucket[1])
    end
    -- The clock may be behind a bucket that was written before: charge that bucket.
    state.newest = math.max(state.newest, state.last)
    state.sum = 0
    for bucket, count in pairs(state.counts) do
      if bucket > state.newest - a[3] then
        state.sum = state.sum + count
      else
        state.old[#state.old + 1] = 'b' .. text(bucket)
      end
    end
    return state
  end,
  allows = function(state, now, a)
    return state.sum <= a[2]
  end,
  left = function(state, now, a)
    return a[1] + a[2] - state.sum
  end,
  charge = function(state, now, a)
    state.counts[state.newest] = (state.counts[state.newest] or 0) + a[1]
    state.sum = state.sum + a[1]
  end,
  -- The bucket, the sum, and when enough permits have left the window: for this request, and all of them.
  report = function(state, now, a, ok)
    local retry_at, reset_at, sum, buckets = 0, 0, state.sum, {}
    for bucket, count in pairs(state.counts) do
      if bucket > state.newest - a[3] and count > 0 then
        buckets[#buckets + 1] = bucket
      end
    end
    table.sort(buckets)
    for _, bucket in ipairs(buckets) do
      reset_at = (bucket + a[3]) * a[4]
      if sum > a[2] and not ok then
        retry_at = reset_at
      end
      sum = sum - state.counts[bucket]
    end
    return {state.newest, state.sum, retry_at, reset_at}
  end,
  write = function(key, state, now, a)
    redis.call('HSET', key, 'b' .. text(state.newest), text(state.counts[state.newest]))
    for i = 1, #state.old, 1000 do
      redis.call('HDEL', key, unpack(state.old, i, math.min(i + 999, #state.old)))
    end
    redis.call('PEXPIREAT', key, expiry((state.newest + a[3]) * a[4]))
  end,
  -- Takes permits out of the last bucket with a charge.
  give_back = function(key, state, now, a, is_cancelled)
    local count = state.counts[state.last]
    if not count or count == 0 or state.last <= state.newest - a[3] or is_cancelled and state.last ~= a[2] then
      return
    end
    redis.call('HSET', key, 'b' .. text(state.last), text(math.max(count - a[1], 0)))
  end,
}
