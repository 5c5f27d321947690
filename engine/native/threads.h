/* Work that is shared by the threads of a pass, see threads.c. */

#ifndef THREADS_H
#define THREADS_H

#include <stddef.h>

/* Runs work(data, part, thread) for each part in [0, parts), on all threads; returns when all are
   done. `thread` is in [0, num_threads()): two parts at a time never have the same one. */
typedef void (*Work)(void *data, size_t part, int thread);
void in_parallel(Work work, void *data, size_t parts);

int num_threads(void);

/* Wakes the pool's threads before a pass, and lets them sleep after it. In between they
   spin, because a pass has some hundred calls of in_parallel, a few microseconds apart. */
void begin_parallel(void);
void end_parallel(void);

#endif
