/* The requests of a program to callgrind, for hot_rows.py. Without callgrind the calls do nothing. */
#include <valgrind/callgrind.h>

void begin(void) {
    CALLGRIND_START_INSTRUMENTATION;
    CALLGRIND_ZERO_STATS;
}

/* Write the counts since begin() to a file of their own. */
void end(const char *name) {
    CALLGRIND_DUMP_STATS_AT(name);
    CALLGRIND_STOP_INSTRUMENTATION;
}
