-- Moves entries from one consumer name of a group to another. With the same name twice, it renews them as being
-- processed. Entries that the first name has lost are unchanged.
-- KEYS[1]: the stream; KEYS[2]: the retries; KEYS[3]: the lease. ARGV[1]: the group; ARGV[2]: the token of the lease, or
-- ''; ARGV[3]: the lease (ms) from now; ARGV[4] and ARGV[5]: the names; ARGV[6]: the idle time (ms) that the entries
-- get; ARGV[7]: how many of the following ids belong to the stream.
-- Returns 1, or -1 if another process has the lease.
if ARGV[2] ~= '' then
  if redis.call('GET', KEYS[3]) ~= ARGV[2] then
    return -1
  end
  redis.call('PEXPIRE', KEYS[3], ARGV[3])
end
local function hand(key, first, last)
  local ids = {}
  for i = first, last do
    if #redis.call('XPENDING', key, ARGV[1], ARGV[i], ARGV[i], 1, ARGV[4]) == 1 then
      ids[#ids + 1] = ARGV[i]
    end
    if #ids == 1000 or (i == last and #ids > 0) then
      local claim = {'XCLAIM', key, ARGV[1], ARGV[5], 0, unpack(ids)}
      for _, option in ipairs({'IDLE', ARGV[6], 'JUSTID'}) do
        claim[#claim + 1] = option
      end
      redis.call(unpack(claim))
      ids = {}
    end
  end
end
local border = 7 + tonumber(ARGV[7])
hand(KEYS[1], 8, border)
hand(KEYS[2], border + 1, #ARGV)
return 1
