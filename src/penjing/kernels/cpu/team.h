/* Threads that work on one pass together, stage after stage: each takes the next piece of the stage that nobody has, and
   goes on when all pieces are done.

   Nobody waits for a thread, only for pieces that were taken. So a thread that the system keeps from running, as another
   program has its core, costs its help and no more; barriers (OpenMP's) would cost a time slice each. A thread that
   comes late walks through the stages that are over, and takes nothing from them. What a pass's threads read while they
   hold no piece must therefore stay readable after its end: it lies in the team's own memory and in the decoder. It may
   be of a later pass already, and tell of other stages: so a pass that is over is marked, and then nothing is taken. */

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

enum { MOST_THREADS = 256, PIECES = 4 }; /* of a stage, for each thread */
enum { STAGE_BITS = 16, ITEM_BITS = 24, OVER = (1 << STAGE_BITS) - 1 }; /* no pass has so many stages */
enum { SPINS = 200, IDLE_YIELDS = 100 }; /* looks before a thread lets others run; and before it sleeps */

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
    _Atomic long done __attribute__((aligned(64)));       /* pieces of this stage */
    _Atomic int asleep __attribute__((aligned(64)));
    _Atomic int stopped, count;                           /* how many take part in this pass */
    int started;
    pid_t owner;                                          /* a forked process has none of its parent's threads */
    pthread_t thread[MOST_THREADS];
    pthread_mutex_t lock;
    pthread_cond_t woken;
    void (*work)(Member *, void *);
    void *what;
} Team;
/* A thread in a pass. team NULL: alone. */
struct Member { Team *team; uint64_t pass; long stage, next; int number, count; };
typedef struct { Team *team; int number; } Newcomer;

static inline uint64_t pass_of(uint64_t ticket) { return ticket >> (STAGE_BITS + ITEM_BITS); }
static inline uint64_t first_ticket(uint64_t pass, uint64_t stage) { return ((pass << STAGE_BITS) + stage) << ITEM_BITS; }

/* The number of a piece of this stage that is to be done, of `pieces`; -1 when all are. */
static long take(Member *t, long pieces) {
    if (!t->team) return t->next < pieces ? t->next++ : (t->next = 0, -1);
    uint64_t mine = first_ticket(t->pass, (uint64_t)t->stage);
    atomic_thread_fence(memory_order_acquire); /* what told of the stage and its pieces was read before the ticket is */
    for (int looks = 0;;) {
        uint64_t now = atomic_load_explicit(&t->team->ticket, memory_order_acquire), next = now - mine;
        if (next >> ITEM_BITS) { t->stage++; return -1; } /* a later stage or another pass */
        if ((long)next < pieces) {
            if (atomic_compare_exchange_weak(&t->team->ticket, &now, now + 1)) return (long)next;
        } else if (++looks < SPINS) PAUSE();
        else sched_yield();
    }
}

/* A piece that was taken is done. */
static void done(Member *t, long pieces) {
    if (!t->team || atomic_fetch_add(&t->team->done, 1) + 1 < pieces) return;
    atomic_store(&t->team->done, 0);
    atomic_store_explicit(&t->team->ticket, first_ticket(t->pass, (uint64_t)t->stage + 1), memory_order_release);
}

/* for each piece that this thread gets */
#define PIECE(t, i, pieces) for (long i; (i = take(t, pieces)) >= 0; done(t, pieces))

/* Waits for a pass other than `seen`; its number. */
static uint64_t next_pass(Team *team, uint64_t seen) {
    for (int looks = 0; looks < SPINS * IDLE_YIELDS; looks++) {
        uint64_t now = pass_of(atomic_load_explicit(&team->ticket, memory_order_acquire));
        if (now != seen || team->stopped) return now;
        if (looks % SPINS) PAUSE(); else sched_yield();
    }
    pthread_mutex_lock(&team->lock);
    atomic_fetch_add(&team->asleep, 1);
    while (pass_of(atomic_load(&team->ticket)) == seen && !team->stopped) pthread_cond_wait(&team->woken, &team->lock);
    atomic_fetch_sub(&team->asleep, 1);
    pthread_mutex_unlock(&team->lock);
    return pass_of(atomic_load(&team->ticket));
}

static void *helper(void *newcomer) {
    Newcomer mine = *(Newcomer *)newcomer;
    free(newcomer);
    for (uint64_t pass = 0;;) {
        pass = next_pass(mine.team, pass);
        if (mine.team->stopped) return 0;
        int count = mine.team->count;
        if (mine.number >= count) continue;
        Member member = {mine.team, pass, 0, 0, mine.number, count};
        mine.team->work(&member, mine.team->what);
    }
}

static void wake(Team *team) {
    if (!atomic_load(&team->asleep)) return;
    pthread_mutex_lock(&team->lock);
    pthread_cond_broadcast(&team->woken);
    pthread_mutex_unlock(&team->lock);
}

static void found(Team *team) {
    pthread_mutex_init(&team->lock, 0);
    pthread_cond_init(&team->woken, 0);
    team->owner = getpid();
    team->started = 0;
    team->asleep = team->stopped = 0;
}

static void start_helper(Team *team) {
    sigset_t all, before;
    Newcomer *newcomer = malloc(sizeof *newcomer);
    if (!newcomer) return;
    *newcomer = (Newcomer){team, team->started + 1};
    sigfillset(&all); /* signals are for the program's own threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (pthread_create(&team->thread[team->started], 0, helper, newcomer)) free(newcomer); else team->started++;
    pthread_sigmask(SIG_SETMASK, &before, 0);
}

/* work(member, what) on so many threads, of which this one is the first; on fewer where the system gives no more. The
   team's memory stays; `work` and `what` are the same each time. */
static void work_together(Team *team, int count) {
    Member first = {0, 0, 0, 0, 0, count};
    if (count > 1) {
        if (team->owner != getpid()) found(team);
        while (team->started < count - 1) {
            int before = team->started;
            start_helper(team);
            if (team->started == before) break;
        }
        first.team = team;
        first.pass = pass_of(team->ticket) + 1;
        atomic_store(&team->count, count);
        atomic_store(&team->done, 0);
        atomic_store(&team->ticket, first_ticket(first.pass, 0));
        wake(team);
    }
    team->work(&first, team->what);
    if (count > 1) {
        atomic_store(&team->ticket, first_ticket(first.pass, OVER));
        atomic_thread_fence(memory_order_seq_cst); /* before anything of the next pass is written */
    }
}

/* Ends the team's threads. */
static void disband(Team *team) {
    if (team->owner != getpid()) return; /* of a parent's, or never founded */
    atomic_store(&team->stopped, 1);
    pthread_mutex_lock(&team->lock);
    pthread_cond_broadcast(&team->woken);
    pthread_mutex_unlock(&team->lock);
    while (team->started) pthread_join(team->thread[--team->started], 0);
}
