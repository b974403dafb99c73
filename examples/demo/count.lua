-- For wrk: counts answers by status, and the admitted ones by the worker that gave them, and prints them as JSON.
-- One thread only (wrk -t 1): each has an interpreter of its own.

local load

function setup(thread)
    load = thread
end

function init()
    -- Globals, because done() runs in another interpreter and fetches them from there.
    statuses, admitted_by = {}, {}
end

function response(status, headers)
    statuses[status] = (statuses[status] or 0) + 1
    if status == 200 then
        local worker = headers["X-Worker"]
        admitted_by[worker] = (admitted_by[worker] or 0) + 1
    end
end

local function json(counts)
    local members = {}
    for name, count in pairs(counts) do
        members[#members + 1] = string.format('"%s": %d', name, count)
    end
    return "{" .. table.concat(members, ", ") .. "}"
end

function done()
    print(string.format('{"statuses": %s, "admitted_by": %s}', json(load:get("statuses")), json(load:get("admitted_by"))))
end
