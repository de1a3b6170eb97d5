// Shares work among threads: our own or OpenMP's.
//
// A job is divided into items. Each thread has its own range, so that it finds its weights in its cache. A thread that
// is done helps the others, so a thread that is not running delays the job at most by the one item that it has begun.
//
// Our own threads spin for a short while and then sleep. OpenMP waits for all threads of a team, even for those with
// nothing left to do, and spins for milliseconds. But torch uses OpenMP, and two sets of spinning threads slow each
// other down. So our threads are only for programs in which torch computes nothing large.
#pragma once

#include <omp.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#include "vec.h"

namespace gp {

constexpr int MOST_THREADS = 256;
constexpr Index ITEMS_OF_THREAD = 8;  // small items, so that all threads end at about the same time
constexpr std::chrono::microseconds SPIN{50};  // longer than the Python code between two layers

GP_INLINE void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Waits for a short while. Returns true if the condition became true.
template <class Condition> bool spin_until(const Condition &is_true) {
    const auto end = std::chrono::steady_clock::now() + SPIN;
    do {
        for (int i = 0; i < 32; ++i, relax())
            if (is_true()) return true;
    } while (std::chrono::steady_clock::now() < end);
    return is_true();
}

using Call = void (*)(const void *context, Index item);

class Job {
  public:
    // Begins a job when no item of the previous one is left. From then on, threads may take items.
    void begin(Call new_call, const void *new_context, Index new_items, int new_threads) {
        call = new_call, context = new_context, items = new_items, threads = new_threads;
        done.store(0, std::memory_order_relaxed);
        for (int i = 0; i < threads; ++i)
            left[i].count.store(first(i + 1) - first(i), std::memory_order_release);
    }

    // Takes and runs items. A late thread that comes while the next job begins takes items of that job: it reads the
    // job's fields only after it has taken an item, and they stay until that item is done.
    void work(int self) {
        for (int i = 0, size = threads.load(std::memory_order_relaxed); i < size; ++i) {
            const int owner = self + i < size ? self + i : self + i - size;
            if (owner >= MOST_THREADS || owner < 0) return;
            Index count = left[owner].count.load(std::memory_order_acquire);
            while (count > 0)
                if (left[owner].count.compare_exchange_weak(count, count - 1, std::memory_order_acquire)) {
                    call(context, first(owner + 1) - count);
                    done.fetch_add(1, std::memory_order_seq_cst);
                    count = left[owner].count.load(std::memory_order_acquire);
                }
        }
    }

    bool is_done() const { return done.load(std::memory_order_seq_cst) == items.load(std::memory_order_relaxed); }

  private:
    Index first(int thread) const {
        return thread * items.load(std::memory_order_relaxed) / threads.load(std::memory_order_relaxed);
    }

    struct alignas(64) Left {
        std::atomic<Index> count{0};
    };
    Left left[MOST_THREADS];
    alignas(64) std::atomic<Index> done{0};
    std::atomic<int> threads{1};
    Call call = nullptr;
    const void *context = nullptr;
    std::atomic<Index> items{0};
};

// Threads of our own, for one job at a time.
class Crew {
  public:
    static Crew &get() {
        static std::atomic<Crew *> crew{new Crew};  // never deleted, as its threads may outlive main()
        static const int is_watched = pthread_atfork(nullptr, nullptr, [] { crew = new Crew; });
        (void)is_watched;
        return *crew;
    }

    // Runs a job. Returns false, without running it, if there is another job or threads cannot be created.
    bool run(Call call, const void *context, Index items, int threads) {
        const std::unique_lock<std::mutex> alone(busy, std::try_to_lock);
        if (!alone || !hire(threads - 1)) return false;
        job.begin(call, context, items, threads);
        num_jobs.fetch_add(1, std::memory_order_seq_cst);
        if (num_asleep.load(std::memory_order_seq_cst)) wake(start);
        job.work(0);
        const auto is_done = [this] { return job.is_done(); };
        if (!spin_until(is_done)) {
            std::unique_lock<std::mutex> lock(sleep);
            is_caller_asleep.store(true, std::memory_order_seq_cst);
            end.wait(lock, is_done);
            is_caller_asleep.store(false, std::memory_order_relaxed);
        }
        return true;
    }

  private:
    bool hire(int count) {
        try {
            for (; num_hired < count; ++num_hired) std::thread([this, i = num_hired + 1] { serve(i); }).detach();
        } catch (const std::system_error &) {
            return false;
        }
        return true;
    }

    void serve(int self) {
        for (Index seen = 0;;) {
            const auto is_called = [&] { return num_jobs.load(std::memory_order_seq_cst) != seen; };
            if (!spin_until(is_called)) {
                std::unique_lock<std::mutex> lock(sleep);
                num_asleep.fetch_add(1, std::memory_order_seq_cst);
                start.wait(lock, is_called);
                num_asleep.fetch_sub(1, std::memory_order_relaxed);
            }
            seen = num_jobs.load(std::memory_order_seq_cst);
            job.work(self);
            if (is_caller_asleep.load(std::memory_order_seq_cst) && job.is_done()) wake(end);
        }
    }

    void wake(std::condition_variable &who) {
        { const std::lock_guard<std::mutex> lock(sleep); }  // a thread that is about to sleep does so first
        who.notify_all();
    }

    Job job;
    std::mutex busy, sleep;
    std::condition_variable start, end;
    std::atomic<Index> num_jobs{0};
    std::atomic<int> num_asleep{0};
    std::atomic<bool> is_caller_asleep{false};
    int num_hired = 0;
};

// True if this thread's jobs run on our own threads.
inline bool &uses_crew() {
    static thread_local bool is_used = false;
    return is_used;
}

// Calls work(item) for all items, on up to `threads` threads.
template <class Work> void share(Index items, int threads, const Work &work) {
    const Call call = [](const void *context, Index item) { (*static_cast<const Work *>(context))(item); };
    if (threads > items) threads = static_cast<int>(items);
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    if (threads > 1 && uses_crew() && Crew::get().run(call, &work, items, threads)) return;
    if (threads > 1 && !uses_crew()) {
        static thread_local Job own;
        Job &job = own;
        job.begin(call, &work, items, threads);
#pragma omp parallel num_threads(threads)
        job.work(omp_get_thread_num());
        return;
    }
    for (Index item = 0; item < items; ++item) work(item);
}

}  // namespace gp
