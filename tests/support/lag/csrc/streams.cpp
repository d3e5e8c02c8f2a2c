// SPDX-License-Identifier: Apache-2.0
#include <Python.h>  // first, as it asks for

#include "streams.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <utility>

namespace lag {

namespace {

thread_local int t_device = 0;
thread_local std::vector<int> t_streams;  // the current one, by device
thread_local bool t_makes_late = false;   // see Stream::be_late

// All of this is never destroyed: threads may still look at it when the process ends.
struct Process {
  std::vector<std::vector<std::unique_ptr<Stream>>> streams;
  std::atomic<unsigned> turn{0};
  std::atomic<bool> ended{false}, forked{false};

  std::mutex sleep_mutex;
  std::condition_variable ending;
  bool is_ending = false;

  std::mutex spans_mutex;
  std::vector<Span> spans;
  std::atomic<bool> records_spans{false};

  std::mutex error_mutex;
  std::exception_ptr error;
  std::atomic<bool> has_error{false};
  std::atomic<int64_t> epoch{0}, failed_epoch{-1};  // see Stream::Entry

  std::mutex links_mutex;
  std::vector<std::array<Clock::time_point, 2>> link_is_free_at;

  std::array<std::atomic<int64_t>, static_cast<size_t>(Count::size)> counts{};
  std::mutex waits_mutex;
  std::map<int64_t, int64_t> waits;

  Process() : streams(device_count()), link_is_free_at(device_count()) {
    for (int device = 0; device < device_count(); ++device)
      for (int id = 0; id < kStreamsPerDevice; ++id)
        streams[device].push_back(std::make_unique<Stream>(device, id));
  }
};
Process& process() {
  static Process* one = [] {
    pthread_atfork(nullptr, nullptr, [] { process().forked = true; });
    return new Process;
  }();
  return *one;
}

int or_current(int device) { return device < 0 ? t_device : device; }

}  // namespace

Settings& settings() {
  static Settings* one = new Settings;
  return *one;
}

size_t from_environment(const char* name, size_t otherwise) {
  const char* value = std::getenv(name);
  return value && *value ? std::strtoull(value, nullptr, 10) : otherwise;
}

int device_count() {
  static int count = std::max<int>(1, static_cast<int>(from_environment("LAG_DEVICES", 2)));
  return count;
}
int current_device() { return t_device; }
void set_device(int device) {
  if (device >= 0) t_device = device;
}

// -- Moments --------------------------------------------------------------------------------------

void Moment::pass() {
  std::lock_guard<std::mutex> lock(mutex_);
  passed_ = true;
  at_ = Clock::now();
  changed_.notify_all();
}
void Moment::wait(bool asks) {
  if (asks && stream_ && !has_passed()) stream_->ask_for(number_);
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return passed_; });
}
bool Moment::has_passed() {
  std::lock_guard<std::mutex> lock(mutex_);
  return passed_;
}
Clock::time_point Moment::at() {
  std::lock_guard<std::mutex> lock(mutex_);
  return at_;
}

// -- Streams --------------------------------------------------------------------------------------

void Stream::launch(Kind kind, Work work) {
  if (process().forked) throw std::runtime_error("lag: this process was forked from one that used the device");
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!process().ended) {
      if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
      queue_.push_back({kind, draw_delay_us(kind), process().epoch, std::move(work)});
      ++num_pending_;
      ++num_launched_;
      if (is_waiting_) changed_.notify_one();
      return;
    }
  }
  // At the end of the process nothing computes any more, but nobody may wait forever.
  if (kind == Kind::bookkeeping) work();
}

void Stream::run() {
  t_device = device;
  while (true) {
    Entry entry;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      is_waiting_ = true;
      changed_.wait(lock, [this] { return !queue_.empty() || is_stopping_; });
      is_waiting_ = false;
      if (queue_.empty()) return;
      entry = std::move(queue_.front());
      queue_.pop_front();
    }
    if (entry.delay_us > 0)
      sleep_until(Clock::now() + std::chrono::nanoseconds(static_cast<int64_t>(entry.delay_us * 1e3)));
    auto began = Clock::now();
    try {
      if (entry.kind == Kind::bookkeeping || entry.epoch > process().failed_epoch) entry.work();
    } catch (...) {
      std::lock_guard<std::mutex> lock(process().error_mutex);
      if (entry.epoch > process().failed_epoch) {
        process().error = std::current_exception();
        process().failed_epoch = process().epoch.load();
        process().has_error = true;
      }
    }
    if (entry.kind != Kind::bookkeeping) add_span(entry.kind, began);
    entry.work = nullptr;  // frees what it holds, before anybody is told that it is done
    std::lock_guard<std::mutex> lock(mutex_);
    --num_pending_;
  }
}

void Stream::add_span(Kind kind, Clock::time_point began) {
  if (!process().records_spans) return;
  auto seconds = [](Clock::time_point time) {
    return std::chrono::duration<double>(time.time_since_epoch()).count();
  };
  Span span{device, id, kind, seconds(began), seconds(Clock::now())};
  std::lock_guard<std::mutex> lock(process().spans_mutex);
  process().spans.push_back(span);
}
void record_spans(bool on) { process().records_spans = on; }
std::vector<Span> take_spans() {
  std::lock_guard<std::mutex> lock(process().spans_mutex);
  return std::exchange(process().spans, {});
}

// Drawn when work is launched, so that a seed gives each stream the same delays every time.
double Stream::draw_delay_us(Kind kind) {
  double longest_us = kind == Kind::kernel ? settings().kernel_delay_us.load()
                      : kind == Kind::copy ? settings().copy_delay_us.load()
                                           : 0;
  if (longest_us <= 0) return 0;
  return settings().jitter ? std::uniform_real_distribution<double>(0, longest_us)(random_) : longest_us;
}

MomentPtr Stream::record() {
  int64_t number;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    number = num_launched_;
  }
  auto moment = std::make_shared<Moment>(this, number);
  launch(Kind::bookkeeping, [moment] { moment->pass(); });
  return moment;
}
void Stream::wait(MomentPtr moment) {
  launch(Kind::bookkeeping, [moment] { moment->wait(); });
}
void Stream::synchronize() {
  wait_on_host(*record());
  raise_pending_error();
}
bool Stream::is_idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return num_pending_ == 0;
}
void Stream::hold() {
  auto gate = std::make_shared<Moment>();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (process().ended) return;
    gates_.push_back(gate);
  }
  wait(gate);
}
bool Stream::release() {
  MomentPtr gate;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (gates_.empty()) return false;
    gate = gates_.back();
    gates_.pop_back();
  }
  gate->pass();
  return true;
}
void Stream::be_late(Clock::time_point at_least, Clock::time_point at_most) {
  t_makes_late = true;
  int64_t number;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    number = num_launched_;
  }
  launch(Kind::bookkeeping, [this, number, at_least, at_most] {
    sleep_until(at_least);
    std::unique_lock<std::mutex> lock(mutex_);
    asked_.wait_until(lock, at_most, [&] { return num_asked_for_ > number || is_stopping_; });
  });
}
void Stream::ask_for(int64_t number) {
  std::lock_guard<std::mutex> lock(mutex_);
  num_asked_for_ = std::max(num_asked_for_, number);
  asked_.notify_all();
}
void Stream::seed(unsigned seed) {
  std::lock_guard<std::mutex> lock(mutex_);
  random_.seed(seed + 1000 * device + id);
}
void Stream::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!thread_.joinable()) return;
    is_stopping_ = true;
    changed_.notify_one();
  }
  thread_.join();
}

Stream& stream(int device, int id) { return *process().streams.at(or_current(device)).at(id); }
Stream& next_stream(int device) {
  return stream(device, 1 + static_cast<int>(process().turn++ % (kStreamsPerDevice - 1)));
}
Stream& current_stream(int device) {
  if (t_streams.empty()) t_streams.resize(device_count(), 0);
  return stream(device, t_streams.at(or_current(device)));
}
int exchange_stream(int device, int id) {
  int before = current_stream(device).id;
  t_streams.at(or_current(device)) = id;
  return before;
}
void seed_delays(unsigned seed) {
  for (auto& device : process().streams)
    for (auto& one : device) one->seed(seed);
}

// -- Waiting --------------------------------------------------------------------------------------

namespace {

// torch waits with Python's lock held in places (`torch.accelerator.empty_cache` is one), where
// CUDA's driver would wait for nobody who needs it. Here another thread may have to end a hold.
class WithoutPythonLock {
 public:
  WithoutPythonLock() : state_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutPythonLock() {
    if (state_) PyEval_RestoreThread(state_);
  }

 private:
  PyThreadState* state_;
};

void count_host_wait(bool blocks) {
  count(Count::host_waits);
  if (blocks) count(Count::host_waits_that_blocked);
  std::lock_guard<std::mutex> lock(process().waits_mutex);
  ++process().waits[syscall(SYS_gettid)];
}

}  // namespace

void wait_on_host(Moment& moment) {
  count_host_wait(!moment.has_passed());
  WithoutPythonLock unlocked;
  moment.wait(t_makes_late);
}

void wait_for_device(int device) {
  std::vector<MomentPtr> moments;
  for (auto& one : process().streams.at(or_current(device)))
    if (!one->is_idle()) moments.push_back(one->record());
  count_host_wait(!moments.empty());
  WithoutPythonLock unlocked;
  for (auto& moment : moments) moment->wait(t_makes_late);
}
void synchronize_device(int device) {
  wait_for_device(device);
  raise_pending_error();
}

void raise_pending_error() {
  if (!process().has_error) return;
  std::exception_ptr error;
  {
    std::lock_guard<std::mutex> lock(process().error_mutex);
    std::swap(error, process().error);
    process().has_error = false;
    if (error) ++process().epoch;
  }
  if (error) std::rethrow_exception(error);
}

void sleep_until(Clock::time_point time) {
  if (time <= Clock::now()) return;
  std::unique_lock<std::mutex> lock(process().sleep_mutex);
  process().ending.wait_until(lock, time, [] { return process().is_ending; });
}

void pay_launch_cost() {
  double cost_us = settings().launch_cost_us;
  if (cost_us <= 0) return;
  auto until = Clock::now() + std::chrono::nanoseconds(static_cast<int64_t>(cost_us * 1e3));
  while (Clock::now() < until) {
  }
}

LinkTime::LinkTime(int device, Direction direction, size_t num_bytes) {
  double bandwidth = settings().bandwidth[direction];
  if (bandwidth <= 0) return;
  auto duration = std::chrono::nanoseconds(static_cast<int64_t>(num_bytes / bandwidth * 1e9));
  std::lock_guard<std::mutex> lock(process().links_mutex);
  auto& free_at = process().link_is_free_at.at(device)[direction];
  until_ = free_at = std::max(free_at, Clock::now()) + duration;
}

void release_all() {
  for (auto& device : process().streams)
    for (auto& one : device)
      while (one->release()) {
      }
}

void shut_down() {
  if (process().forked) return;
  {
    std::lock_guard<std::mutex> lock(process().sleep_mutex);
    process().is_ending = true;
    process().ending.notify_all();
  }
  release_all();
  for (int device = 0; device < device_count(); ++device) wait_for_device(device);
  process().ended = true;
  for (auto& device : process().streams)
    for (auto& one : device) one->stop();
  try {
    raise_pending_error();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "lag: a kernel failed and nobody asked: %s\n", error.what());
  }
}
bool was_forked() { return process().forked; }

// -- Counters -------------------------------------------------------------------------------------

void count(Count what) { ++process().counts[static_cast<size_t>(what)]; }
std::map<std::string, int64_t> counters() {
  static const char* names[] = {"kernels",
                                "copies_to_host",
                                "copies_from_host",
                                "copies_on_device",
                                "copies_not_waited_for",
                                "operations_that_waited",
                                "host_waits",
                                "host_waits_that_blocked"};
  static_assert(std::size(names) == static_cast<size_t>(Count::size));
  std::map<std::string, int64_t> result;
  for (size_t n = 0; n < std::size(names); ++n) result[names[n]] = process().counts[n];
  return result;
}
std::map<int64_t, int64_t> host_waits_by_thread() {
  std::lock_guard<std::mutex> lock(process().waits_mutex);
  return process().waits;
}

}  // namespace lag
