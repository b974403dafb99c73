-- A host reports its counts in one window of a key, or in two.
--
-- KEYS: a hash for each window, then its hot list for each. ARGV: the host; the key's incarnation there; when the
-- host read its counts; the length of a window; and the sum from which on a key is hot. Then for each window: the
-- host's count, or -1 to report nothing; how much of it Redis knew once; the other hosts' count that this host has
-- learned; and the window's end. Reports are accepted from a whole window before it begins, and kept after its end for
-- as many windows as it counts for, so that hosts' clocks may be fast or slow by so much.
-- Reply: 1; the time; then for each window the sum of all hosts, what Redis knows of this host, and AS_IT_IS, LOST or
-- FULL; or -1, 0 and OVER or FAR. Or -1 and the index of a key that holds a foreign value.
local AS_IT_IS, OVER, LOST, FULL, FAR = 0, 1, 2, 3, 4
local host, incarnation, read_at, period = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local share, count = tonumber(ARGV[5]), #KEYS / 2
local now, windows, scores = clock(), {}, {}
for i = 1, count do
  windows[i] = read_report(KEYS[i], host, incarnation)
  scores[i] = read_score(KEYS[count + i], KEYS[i])
  if not windows[i] then
    return {-1, i}
  end
  if scores[i] == nil then
    return {-1, count + i}
  end
end

local answer = {1, now}
for i = 1, count do
  local key, list, report, first = KEYS[i], KEYS[count + i], windows[i], 4 * i + 2
  local used, believed = tonumber(ARGV[first]), tonumber(ARGV[first + 1])
  local others, ends = tonumber(ARGV[first + 2]), tonumber(ARGV[first + 3])
  local until_us = ends + count * period
  if until_us <= now or ends - 2 * period > now then
    table.insert(answer, -1)
    table.insert(answer, 0)
    table.insert(answer, until_us <= now and OVER or FAR)
  else
    local taken = AS_IT_IS
    local published = scores[i] and tonumber(scores[i]) or 0
    if report.is_new and believed > 0 or math.max(others, published) > report.most then
      -- The other hosts will report again, but later: until then the sum is too small.
      report.is_lost = true
      redis.call('HSET', key, 'lost', '1')
      redis.call('PEXPIREAT', key, expiry(until_us))
    end
    if report.is_lost then
      taken = LOST
    end
    if used >= 0 and read_at > report.read then
      if has_room(key, report) then
        -- A count of another incarnation stays in the sum.
        report.sum = math.max(report.sum + used - (report.known or 0), 0)
        report.known = used
        write_report(key, report, host, read_at, incarnation, used, now, until_us)
        if report.sum > report.most then
          redis.call('HSET', key, 'most', text(report.sum))
        end
      else
        -- No host is evicted: an evicted host's next report would be added a second time.
        taken = FULL
      end
    end
    if publish(list, scores[i], key, math.max(report.sum, report.is_lost and published or 0), share, now) then
      redis.call('PEXPIREAT', list, expiry(until_us))
    end
    table.insert(answer, report.sum)
    table.insert(answer, report.known or 0)
    table.insert(answer, taken)
  end
end
return answer
