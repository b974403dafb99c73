/* penstock's insertion (src/penstock/core/table.pyx): NP processes of one key in a probe set of C cells, while other
 * keys' cells there expire, are reused and evicted. A process that is never scheduled again is a crashed one.
 *
 *   spin -a insertion.pml && cc -O2 -DSAFETY -DCOLLAPSE -o pan pan.c && ./pan -m400000
 *
 * -DNOSCAN leaves out the scan, -DPLAINPROMOTE promotes without checking the claim's id, -DEVICTSELF lets a request
 * evict the member of its own key that came after it had looked: all must be caught.
 */
#ifndef C
#define C 3
#endif
#ifndef NP
#define NP 2
#endif
#ifndef TRIES
#define TRIES 4
#endif
#define LIMIT 1
#define EMPTY 0
#define LIVEX 100
#define EXPX 101
#define CLAIM 200
#define MEM 300
short c[C];
byte admitted = 0;
byte envsteps = 0;
inline members_ok() { assert((c[0] >= MEM) + (c[1] >= MEM) + (c[2] >= MEM) <= 1) }
inline CAS(i, o, n, ok) { atomic { if :: c[i] == o -> c[i] = n; ok = 1 :: else -> ok = 0 fi } }
#define IS_CLAIM(v) ((v) >= CLAIM && (v) < MEM)

proctype P(byte me) {
    byte i; byte pos; short id; short v; short w; byte ok; byte att = 0; bool have;
restart:
    if :: att >= TRIES -> goto done :: else -> att++ fi;
    /* find_member */
    i = 0;
    do
    :: i < C ->
        v = c[i];
        if
        :: v >= MEM ->
            if
            :: v - MEM < LIMIT ->
                atomic { if :: c[i] == v -> c[i] = v + 1; ok = 1; admitted++ :: else -> ok = 0 fi };
                assert(admitted <= LIMIT);
                if :: ok -> goto done :: else -> goto restart fi
            :: else -> goto done
            fi
        :: else -> i++
        fi
    :: else -> break
    od;
    /* find_claim */
    have = 0; i = 0;
    do
    :: i < C && !have -> v = c[i]; if :: IS_CLAIM(v) -> have = 1; pos = i; id = v :: else -> i++ fi
    :: else -> break
    od;
    if
    :: !have ->
        /* choose_vacancy: any of the vacant cells; a live cell of another key where eviction is allowed */
        i = 0;
        do
        :: i < C ->
            v = c[i];
            if
            :: v == EMPTY || v == EXPX || v == LIVEX -> if :: have = 1; pos = i; w = v :: skip fi
            :: v >= MEM ->
#ifdef EVICTSELF
                if :: have = 1; pos = i; w = v :: skip fi
#else
                goto restart
#endif
            :: else -> skip
            fi;
            i++
        :: else -> break
        od;
        if :: !have -> goto restart :: else fi;
        id = CLAIM + me * 10 + att;
        CAS(pos, w, id, ok);
        if :: !ok -> goto restart :: else fi
    :: else
    fi;
#ifndef NOSCAN
    i = 0;
    do
    :: i < C && i != pos ->
        v = c[i];
        if
        :: v >= MEM -> CAS(pos, id, EMPTY, ok); goto restart
        :: IS_CLAIM(v) ->
            if
            :: i > pos -> CAS(i, v, EMPTY, ok); if :: ok -> i++ :: else -> skip fi
            :: else -> CAS(pos, id, EMPTY, ok); pos = i; id = v; i = 0
            fi
        :: else -> i++
        fi
    :: i < C && i == pos -> i++
    :: else -> break
    od;
#endif
    /* promote with the caller's own charge: the first permit */
#ifdef PLAINPROMOTE
    atomic { c[pos] = MEM + 1; ok = 1; admitted++; assert(admitted <= LIMIT) };
#else
    atomic { if :: c[pos] == id -> c[pos] = MEM + 1; ok = 1; admitted++ :: else -> ok = 0 fi; members_ok(); assert(admitted <= LIMIT) };
#endif
    if :: ok -> goto done :: else -> goto restart fi;
done:
    skip
}
/* Other keys: a live cell expires or comes alive, an empty one is taken; nobody takes a member or a claim of our key,
   except that a claim may be taken away at any time (it was stale). */
proctype Env() {
    byte i;
    do
    :: envsteps < 3 ->
        envsteps++;
        select(i : 0 .. (C - 1));
        atomic {
            if
            :: c[i] == LIVEX -> c[i] = EXPX
            :: c[i] == EXPX -> c[i] = LIVEX
            :: c[i] == EMPTY -> c[i] = LIVEX
            :: IS_CLAIM(c[i]) -> c[i] = LIVEX
            :: else -> skip
            fi
        }
    :: break
    od
}
init { atomic { c[0] = LIVEX; c[1] = EXPX; byte k; for (k : 0 .. (NP - 1)) { run P(k) }; run Env() } }
