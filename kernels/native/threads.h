// The team of threads that runs one call, and how they wait for each other.
//
// The threads are those of torch's own OpenMP pool (set_pool), so that no second pool spins beside
// it. Without one a call runs on the caller's thread alone. Nothing here knows what is computed.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace native {

// OpenMP's outlined call: `parallel` runs body(data) on `count` threads and waits for them.
using ParallelFn = void (*)(void (*body)(void *), void *data, unsigned count, unsigned flags);
using TeamSizeFn = int (*)();

inline ParallelFn pool_parallel = nullptr;
inline TeamSizeFn pool_team_size = nullptr;

// Looks at the other thread's flag before giving the core away: about 50 us, which is more than any
// stage of a small model and less than the time slice of whoever else wants the core.
constexpr int SPINS = 2000;

inline void pause_briefly() {
#if defined(__x86_64__) || defined(_M_X64)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Team {
  public:
    // Called by every thread of the team before anything else; the first one tells the size.
    void enter(int size) { size_.store(size, std::memory_order_release); }

    // This thread's own number, 0 for the first that comes.
    int number() { return entered_.fetch_add(1, std::memory_order_acq_rel); }

    int size() const { return size_.load(std::memory_order_acquire); }

    // All threads of the team arrive before one leaves. Starts a new round of take().
    void barrier() {
        const int size = this->size();
        if (size == 1) {
            taken_.store(0, std::memory_order_relaxed);
            return;
        }
        const int round = round_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
            arrived_.store(0, std::memory_order_relaxed);
            taken_.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; round_.load(std::memory_order_acquire) == round; ++spins) {
            if (spins < SPINS) {
                pause_briefly();
            } else {
                std::this_thread::yield();
            }
        }
    }

    // The first of the next `count` items that nobody has taken since the last barrier.
    int64_t take(int64_t count) { return taken_.fetch_add(count, std::memory_order_relaxed); }

  private:
    alignas(64) std::atomic<int> size_{1};
    std::atomic<int> entered_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> round_{0};
    alignas(64) std::atomic<int64_t> taken_{0};
};

// Run body(team, number) on `threads` threads of the pool; on this one alone without a pool.
template <typename Body> void run_team(int threads, const Body &body) {
    struct Call {
        Team team;
        const Body *body;
    } call;
    call.body = &body;
    if (threads <= 1 || pool_parallel == nullptr) {
        call.team.enter(1);
        body(call.team, call.team.number());
        return;
    }
    auto outlined = [](void *data) {
        Call &mine = *static_cast<Call *>(data);
        // The pool may give fewer threads than asked for.
        mine.team.enter(pool_team_size());
        (*mine.body)(mine.team, mine.team.number());
    };
    pool_parallel(outlined, &call, static_cast<unsigned>(threads), 0);
}

}  // namespace native
