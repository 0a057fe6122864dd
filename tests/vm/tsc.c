/* Prints the rate of the time stamp counter in kHz, measured against the clock for 50 ms: the guest must not measure
 * it itself, because on a busy machine it gets it wrong by any factor (see README.md). */
#include <stdint.h>
#include <stdio.h>
#include <time.h>
#include <x86intrin.h>

struct sample {
    uint64_t ticks;
    int64_t ns;
};

/* The least disturbed of some readings: the one whose two readings of the counter lie closest. */
static struct sample sample(void) {
    struct sample best = {0, 0};
    uint64_t least = UINT64_MAX;
    for (int i = 0; i < 100; i++) {
        struct timespec ts;
        uint64_t before = __rdtsc();
        clock_gettime(CLOCK_MONOTONIC, &ts);
        uint64_t taken = __rdtsc() - before;
        if (taken < least) {
            least = taken;
            best.ticks = before + taken / 2;
            best.ns = ts.tv_sec * INT64_C(1000000000) + ts.tv_nsec;
        }
    }
    return best;
}

int main(void) {
    struct timespec pause = {0, 50000000};
    struct sample first = sample();
    nanosleep(&pause, NULL);
    struct sample last = sample();
    printf("%.0f\n", (double)(last.ticks - first.ticks) * 1e6 / (double)(last.ns - first.ns));
    return 0;
}
