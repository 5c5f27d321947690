/* A pool of threads for the parts of a pass.

   Each thread has a range of a job's parts and takes them in order, because a part prefetches the next
   one's data; then it takes the remaining parts of other threads' ranges. A thread that the system has
   suspended delays a job only if it has taken a part.

   A range's `ticket` has the number of its job in the upper half and the number of parts that are not
   taken yet in the lower half. A thread takes a part by decrementing it. The job's fields change only
   when all parts of the job before are done, and a thread reads them only after it has taken a part, so
   no thread ever sees a mixture. */

#include "threads.h"

#include "pass.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
  MAX_THREADS = 64,
  CACHE_LINE = 64,
  SPINS = 2000 /* before the processor is yielded: some 20 us. More holds up other processes. */
};

static struct {
  struct {
    _Alignas(CACHE_LINE) _Atomic uint64_t ticket;
  } ranges[MAX_THREADS];
  _Atomic size_t done; /* parts of the current job */
  _Atomic uint32_t awake; /* odd: a pass is under way; a futex */
  _Atomic int stop;
  Work work;
  void *data;
  size_t parts;
  _Atomic int count; /* threads, the calling one among them */
  pthread_t threads[MAX_THREADS];
} pool = {.count = 1};

static inline void pause_briefly(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

static size_t range_begin(size_t range) { return range * pool.parts / (size_t)pool.count; }

/* Takes a part of the current job and runs it. Returns 0 if all parts are taken. */
static int run_part(int thread) {
  const int count = pool.count;
  for (int i = 0; i < count; i++) {
    const int range = (thread + i) % count;
    _Atomic uint64_t *const place = &pool.ranges[range].ticket;
    uint64_t ticket = atomic_load_explicit(place, memory_order_acquire);
    while ((uint32_t)ticket) {
      if (!atomic_compare_exchange_weak_explicit(place, &ticket, ticket - 1, memory_order_acquire,
                                                 memory_order_acquire))
        continue;
      pool.work(pool.data, range_begin((size_t)range + 1) - (uint32_t)ticket, thread);
      atomic_fetch_add_explicit(&pool.done, 1, memory_order_release);
      return 1;
    }
  }
  return 0;
}

static void *serve(void *argument) {
  const int thread = (int)(intptr_t)argument;
  int spins = 0;
  while (!atomic_load_explicit(&pool.stop, memory_order_acquire)) {
    const uint32_t awake = atomic_load_explicit(&pool.awake, memory_order_acquire);
    if (!(awake & 1)) {
      syscall(SYS_futex, &pool.awake, FUTEX_WAIT_PRIVATE, awake, NULL, NULL, 0);
      spins = 0;
    } else if (run_part(thread)) {
      spins = 0;
    } else if (++spins < SPINS) {
      pause_briefly();
    } else {
      sched_yield();
    }
  }
  return NULL;
}

int num_threads(void) { return pool.count; }

void in_parallel(Work work, void *data, size_t parts) {
  if (pool.count == 1 || parts < 2) {
    for (size_t part = 0; part < parts; part++) work(data, part, 0);
    return;
  }
  pool.work = work;
  pool.data = data;
  pool.parts = parts;
  atomic_store_explicit(&pool.done, 0, memory_order_relaxed);
  for (size_t range = 0; range < (size_t)pool.count; range++) {
    _Atomic uint64_t *const place = &pool.ranges[range].ticket;
    const uint64_t job = (atomic_load_explicit(place, memory_order_relaxed) >> 32) + 1;
    atomic_store_explicit(place, job << 32 | (range_begin(range + 1) - range_begin(range)),
                          memory_order_release);
  }
  while (run_part(0)) {}
  for (int spins = 0; atomic_load_explicit(&pool.done, memory_order_acquire) < parts;)
    if (++spins < SPINS)
      pause_briefly();
    else
      sched_yield();
}

void begin_parallel(void) {
  if (pool.count == 1) return;
  atomic_fetch_add_explicit(&pool.awake, 1, memory_order_release);
  syscall(SYS_futex, &pool.awake, FUTEX_WAKE_PRIVATE, MAX_THREADS, NULL, NULL, 0);
}

void end_parallel(void) {
  if (pool.count > 1) atomic_fetch_add_explicit(&pool.awake, 1, memory_order_release);
}

int use_threads(int count) {
  if (count > MAX_THREADS) count = MAX_THREADS;
  if (count < 1) count = 1;
  atomic_store(&pool.stop, 1);
  begin_parallel();
  for (int i = 1; i < pool.count; i++) pthread_join(pool.threads[i], NULL);
  end_parallel();
  atomic_store(&pool.stop, 0);
  for (pool.count = 1; pool.count < count; pool.count++)
    if (pthread_create(&pool.threads[pool.count], NULL, serve, (void *)(intptr_t)pool.count)) break;
  return pool.count;
}
