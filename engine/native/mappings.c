/* Mapped files that are cut off, or that their disk cannot read, while they are in use.

   Reading such a page raises SIGBUS, which would end the process. In a guarded mapping the handler replaces
   all pages by zeros in place of that and marks the mapping as lost, so that the read goes on. */

#include "pass.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static Mapping *guarded;
static struct sigaction before; /* for SIGBUS elsewhere */

/* Guards both. The handler may wait for it, because a thread that holds it reads no mapped file. */
static atomic_flag lock = ATOMIC_FLAG_INIT;

static void acquire(void) {
  while (atomic_flag_test_and_set_explicit(&lock, memory_order_acquire)) sched_yield();
}

static void release(void) { atomic_flag_clear_explicit(&lock, memory_order_release); }

/* Returns whether `address` is in a guarded mapping, whose pages are zeros then. */
static int replace(const void *address) {
  Mapping *mapping = guarded;
  while (mapping && (uintptr_t)address - (uintptr_t)mapping->begin >= mapping->size) mapping = mapping->next;
  if (!mapping) return 0;
  const int flags = MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  /* The system call itself: a sanitizer would take `mmap` for a write to memory that threads read. */
  if (syscall(SYS_mmap, mapping->begin, mapping->size, PROT_READ, flags, -1, 0) == -1) return 0;
  mapping->lost = 1;
  return 1;
}

static void on_sigbus(int number, siginfo_t *info, void *context) {
  (void)context;
  const int error = errno, is_fault = info->si_code > 0; /* otherwise a process has sent it */
  int replaced = 0;
  if (is_fault) {
    acquire();
    replaced = replace(info->si_addr);
    release();
  }
  if (!replaced) {
    static atomic_flag again = ATOMIC_FLAG_INIT; /* a handler has brought this one back */
    if (atomic_flag_test_and_set(&again)) signal(number, SIG_DFL);
    else sigaction(number, &before, NULL);
    if (!is_fault) raise(number); /* when this function returns; a fault comes again by itself */
  }
  errno = error;
}

void guard(Mapping *mapping) {
  struct sigaction handler = {.sa_sigaction = on_sigbus, .sa_flags = SA_SIGINFO | SA_ONSTACK}, current;
  acquire();
  mapping->next = guarded;
  guarded = mapping;
  sigaction(SIGBUS, NULL, &current);
  if (current.sa_sigaction != on_sigbus) sigaction(SIGBUS, &handler, &before);
  release();
}

void end_guard(Mapping *mapping) {
  acquire();
  if (guarded == mapping) {
    guarded = mapping->next;
  } else {
    Mapping *previous = guarded;
    while (previous->next != mapping) previous = previous->next;
    previous->next = mapping->next;
  }
  release();
}
