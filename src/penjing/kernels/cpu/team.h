/* A team of threads that run a pass stage by stage: each takes the next free piece of the stage, and goes on to the next
   stage when all pieces are done.

   Threads wait only for pieces that were taken, not for each other. So a descheduled thread (another program has its
   core) costs only its own work, where a barrier (OpenMP) would cost a time slice per stage. A late thread walks through
   finished stages and takes nothing. So what threads read while they hold no piece must stay readable after the pass: it
   is in the team's memory and in the decoder. It may already belong to a later pass with other stages: therefore a
   finished pass is marked, and then no piece can be taken. */

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

enum { MAX_THREADS = 256, PIECES_PER_THREAD = 4 }; /* pieces of a stage, per thread */
enum { STAGE_BITS = 16, ITEM_BITS = 24, LAST_STAGE = (1 << STAGE_BITS) - 1 }; /* more stages than any pass has */
enum { SPINS = 200, IDLE_YIELDS = 100 }; /* spins before a thread yields; yields before it sleeps */

#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() ((void)0)
#endif

typedef struct Member Member;
typedef struct {
    _Atomic uint64_t ticket __attribute__((aligned(64))); /* number of the pass, of its stage, and of the next piece */
    _Atomic long pieces_done __attribute__((aligned(64)));       /* pieces of this stage */
    _Atomic int sleeping __attribute__((aligned(64)));
    _Atomic int stopped, count;                           /* count: threads of this pass */
    int started;
    pid_t owner;                                          /* process id: a forked child has none of the threads */
    pthread_t thread[MAX_THREADS];
    pthread_mutex_t lock;
    pthread_cond_t wakeup;
    void (*work)(Member *, void *);
    void *context;
} Team;
/* A thread in a pass. team NULL: a single thread. */
struct Member { Team *team; uint64_t pass; long stage, next; int number, count; };
typedef struct { Team *team; int number; } WorkerArgs;

static inline uint64_t pass_of(uint64_t ticket) { return ticket >> (STAGE_BITS + ITEM_BITS); }
static inline uint64_t first_ticket(uint64_t pass, uint64_t stage) { return ((pass << STAGE_BITS) + stage) << ITEM_BITS; }

/* Takes a piece of this stage, of `pieces`; returns its number, or -1 when all are done. */
static long next_piece(Member *t, long pieces) {
    if (!t->team) return t->next < pieces ? t->next++ : (t->next = 0, -1);
    uint64_t first = first_ticket(t->pass, (uint64_t)t->stage);
    atomic_thread_fence(memory_order_acquire); /* reads of the stage's description come before that of the ticket */
    for (int spins = 0;;) {
        uint64_t now = atomic_load_explicit(&t->team->ticket, memory_order_acquire), next = now - first;
        if (next >> ITEM_BITS) { t->stage++; return -1; } /* a later stage or another pass */
        if ((long)next < pieces) {
            if (atomic_compare_exchange_weak(&t->team->ticket, &now, now + 1)) return (long)next;
        } else if (++spins < SPINS) PAUSE();
        else sched_yield();
    }
}

/* Marks a piece as done. */
static void piece_done(Member *t, long pieces) {
    if (!t->team || atomic_fetch_add(&t->team->pieces_done, 1) + 1 < pieces) return;
    atomic_store(&t->team->pieces_done, 0);
    atomic_store_explicit(&t->team->ticket, first_ticket(t->pass, (uint64_t)t->stage + 1), memory_order_release);
}

/* for each piece that this thread gets */
#define FOR_PIECES(t, i, pieces) for (long i; (i = next_piece(t, pieces)) >= 0; piece_done(t, pieces))

/* Waits for a pass other than `seen`; returns its number. */
static uint64_t next_pass(Team *team, uint64_t seen) {
    for (int spins = 0; spins < SPINS * IDLE_YIELDS; spins++) {
        uint64_t now = pass_of(atomic_load_explicit(&team->ticket, memory_order_acquire));
        if (now != seen || team->stopped) return now;
        if (spins % SPINS) PAUSE(); else sched_yield();
    }
    pthread_mutex_lock(&team->lock);
    atomic_fetch_add(&team->sleeping, 1);
    while (pass_of(atomic_load(&team->ticket)) == seen && !team->stopped) pthread_cond_wait(&team->wakeup, &team->lock);
    atomic_fetch_sub(&team->sleeping, 1);
    pthread_mutex_unlock(&team->lock);
    return pass_of(atomic_load(&team->ticket));
}

static void *worker_main(void *worker) {
    WorkerArgs args = *(WorkerArgs *)worker;
    free(worker);
    for (uint64_t pass = 0;;) {
        pass = next_pass(args.team, pass);
        if (args.team->stopped) return 0;
        int count = args.team->count;
        if (args.number >= count) continue;
        Member member = {args.team, pass, 0, 0, args.number, count};
        args.team->work(&member, args.team->context);
    }
}

static void wake(Team *team) {
    if (!atomic_load(&team->sleeping)) return;
    pthread_mutex_lock(&team->lock);
    pthread_cond_broadcast(&team->wakeup);
    pthread_mutex_unlock(&team->lock);
}

static void init_team(Team *team) {
    pthread_mutex_init(&team->lock, 0);
    pthread_cond_init(&team->wakeup, 0);
    team->owner = getpid();
    team->started = 0;
    team->sleeping = team->stopped = 0;
}

static void start_worker(Team *team) {
    sigset_t all, before;
    WorkerArgs *worker = malloc(sizeof *worker);
    if (!worker) return;
    *worker = (WorkerArgs){team, team->started + 1};
    sigfillset(&all); /* the program's own threads handle signals */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (pthread_create(&team->thread[team->started], 0, worker_main, worker)) free(worker); else team->started++;
    pthread_sigmask(SIG_SETMASK, &before, 0);
}

/* Runs work(member, context) on `count` threads, of which this one is the first; on fewer if the system gives no more.
   The team's memory, `work` and `context` stay the same from call to call. */
static void run_team(Team *team, int count) {
    Member first = {0, 0, 0, 0, 0, count};
    if (count > 1) {
        if (team->owner != getpid()) init_team(team);
        while (team->started < count - 1) {
            int before = team->started;
            start_worker(team);
            if (team->started == before) break;
        }
        first.team = team;
        first.pass = pass_of(team->ticket) + 1;
        atomic_store(&team->count, count);
        atomic_store(&team->pieces_done, 0);
        atomic_store(&team->ticket, first_ticket(first.pass, 0));
        wake(team);
    }
    team->work(&first, team->context);
    if (count > 1) {
        atomic_store(&team->ticket, first_ticket(first.pass, LAST_STAGE));
        atomic_thread_fence(memory_order_seq_cst); /* before anything of the next pass is written */
    }
}

/* Ends the team's threads. */
static void stop_team(Team *team) {
    if (team->owner != getpid()) return; /* a parent's, or never initialised */
    atomic_store(&team->stopped, 1);
    pthread_mutex_lock(&team->lock);
    pthread_cond_broadcast(&team->wakeup);
    pthread_mutex_unlock(&team->lock);
    while (team->started) pthread_join(team->thread[--team->started], 0);
}
