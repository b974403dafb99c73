-- Publishes a message to all hosts.
--
-- ARGV: the channel; the message. Reply: 1; and the time.
redis.call('PUBLISH', ARGV[1], ARGV[2])
return {1, clock()}
