// SPDX-License-Identifier: Apache-2.0
// A device that lags behind its host: its streams, which are threads, and moments in them, of which
// torch's events are made. Knows nothing of tensors.
//
// Locks: a thread of a stream holds none while it works, and never takes Python's. Whoever waits for
// a stream gives Python's lock up meanwhile.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace lag {

using Clock = std::chrono::steady_clock;

constexpr int kStreamsPerDevice = 33;  // the default one and a pool, as CUDA's

enum Direction { kToHost, kFromHost };

// What tests set. Durations are in microseconds, bandwidths in bytes a second; 0: none.
struct Settings {
  std::atomic<double> kernel_delay_us{0};  // before each kernel
  std::atomic<double> copy_delay_us{0};    // before each copy between device and host
  std::atomic<bool> jitter{true};          // delays are drawn from [0, delay]; else they are the delay
  std::atomic<double> launch_cost_us{0};   // what the host pays for each kernel and copy
  std::array<std::atomic<double>, 2> bandwidth{};  // by direction
  std::atomic<bool> poison{true};          // memory that is fresh or freed is overwritten
};
Settings& settings();
void seed_delays(unsigned seed);  // of all streams

size_t from_environment(const char* name, size_t otherwise);
int device_count();  // LAG_DEVICES, 2 if unset
int current_device();
void set_device(int device);

class Stream;

// One recording of an event.
class Moment {
 public:
  Moment(Stream* stream = nullptr, int64_t number = 0) : stream_(stream), number_(number) {}
  void pass();
  void wait(bool asks = true);  // asks: ends what `be_late` holds back until a wait
  bool has_passed();
  Clock::time_point at();  // once it has passed

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool passed_ = false;
  Clock::time_point at_;
  Stream* stream_;  // in which it was recorded ...
  int64_t number_;  // ... and after how many launches
};
using MomentPtr = std::shared_ptr<Moment>;

enum class Kind { kernel, copy, sleep, bookkeeping };
using Work = std::function<void()>;

// What a stream did from one moment until another, in seconds of the monotonic clock.
struct Span {
  int device, stream;
  Kind kind;
  double began_s, ended_s;
};
void record_spans(bool on);  // of all streams, bookkeeping left out
std::vector<Span> take_spans();

// A queue whose thread works it off, in order.
class Stream {
 public:
  Stream(int device, int id) : device(device), id(id) { seed(7); }
  void launch(Kind kind, Work work);
  MomentPtr record();           // passes when all that was launched before has run
  void wait(MomentPtr moment);  // what is launched from now on runs after it
  void synchronize();           // the calling thread waits; raises what a kernel raised
  bool is_idle();
  void hold();     // nothing that is launched from now on runs ...
  bool release();  // ... before this, which ends the latest hold; false: there is none
  // Nothing that is launched from now on runs before the first of the two moments, and before the
  // second one only if a stream waits for it, or a thread of the host that calls this.
  void be_late(Clock::time_point at_least, Clock::time_point at_most);
  void ask_for(int64_t number);  // a stream or thread waits for so many launches
  void seed(unsigned seed);
  void stop();  // ends the thread when the queue is empty

  const int device, id;

 private:
  struct Entry {
    Kind kind;
    double delay_us;
    int64_t epoch;  // how many errors had been raised when it was launched
    Work work;
  };
  void run();
  double draw_delay_us(Kind kind);
  void add_span(Kind kind, Clock::time_point began);

  std::mutex mutex_;  // protects what follows
  std::condition_variable changed_;
  std::deque<Entry> queue_;
  size_t num_pending_ = 0;
  int64_t num_launched_ = 0, num_asked_for_ = 0;
  std::condition_variable asked_;
  bool is_waiting_ = false, is_stopping_ = false;
  std::deque<MomentPtr> gates_;
  std::mt19937 random_;
  std::thread thread_;  // begins with the first launch
};

Stream& stream(int device, int id);
Stream& next_stream(int device);  // one of the pool, in turn
Stream& current_stream(int device);
int exchange_stream(int device, int id);
void wait_for_device(int device);
void synchronize_device(int device);  // and raises what a kernel raised
// What a kernel of any stream raised, once. Kernels and copies that were launched before that do not
// run any more, as after a CUDA error: on what the failed one did not compute they might end the process.
void raise_pending_error();
void wait_on_host(Moment& moment);    // counts as a wait of the calling thread
void release_all();                   // all holds

void sleep_until(Clock::time_point time);  // for threads of streams: ends early at the process's end
void pay_launch_cost();                    // the calling thread is busy for so long

// Time that a copy of so many bytes takes on the link of a device, from now on or from when the
// copies before it in the same direction are through. Ends when it is over.
class LinkTime {
 public:
  LinkTime(int device, Direction direction, size_t num_bytes);
  ~LinkTime() { sleep_until(until_); }

 private:
  Clock::time_point until_;
};

// Waits until all streams are idle, and ends their threads. Nothing runs from then on.
void shut_down();
void become_accelerator();  // device.cpp: torch asks this device for pinned memory, among others
bool was_forked();  // threads of streams stayed behind in the parent

enum class Count {
  kernels,
  copies_to_host,
  copies_from_host,
  copies_on_device,
  copies_not_waited_for,
  operations_that_waited,  // for numbers or for sizes that depend on data
  host_waits,              // for a moment, a stream or a device
  host_waits_that_blocked,
  size,
};
void count(Count what);
std::map<std::string, int64_t> counters();
std::map<int64_t, int64_t> host_waits_by_thread();  // by the system's number of the thread

}  // namespace lag
