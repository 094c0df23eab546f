// Streams and events. All work is done when the call that issues it returns, so a stream is a number and waiting is
// nothing; an event remembers when it was recorded. Limits of cores are remembered, and limit nothing.
#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <utility>

#include "acl/acl.h"

namespace {

struct Stream {
  int32_t id;
};

struct Event {
  double microseconds;
};

std::atomic<int32_t> next_stream{0};

constexpr uint32_t kCores[] = {20, 40};  // by aclrtDevResLimitType: cube, vector

struct Limits {
  std::mutex mutex;
  std::map<std::pair<aclrtStream, int>, uint32_t> cores;
};

Limits& limits() {
  static Limits all;
  return all;
}

double now() {
  auto time = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::micro>(time).count();
}

Event* as_event(aclrtEvent event) { return static_cast<Event*>(event); }

}  // namespace

aclError aclrtCreateStream(aclrtStream* stream) {
  *stream = new Stream{next_stream++};
  return ACL_SUCCESS;
}

aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) { return aclrtCreateStream(stream); }

aclError aclrtDestroyStream(aclrtStream stream) {
  delete static_cast<Stream*>(stream);
  return ACL_SUCCESS;
}

aclError aclrtDestroyStreamForce(aclrtStream stream) { return aclrtDestroyStream(stream); }
aclError aclrtStreamAbort(aclrtStream) { return ACL_SUCCESS; }
aclError aclrtSynchronizeStream(aclrtStream) { return ACL_SUCCESS; }
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream, int32_t) { return ACL_SUCCESS; }
aclError aclrtSynchronizeDevice() { return ACL_SUCCESS; }
aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return ACL_SUCCESS; }

aclError aclrtStreamQuery(aclrtStream, aclrtStreamStatus* status) {
  *status = ACL_STREAM_STATUS_COMPLETE;
  return ACL_SUCCESS;
}

aclError aclrtStreamGetId(aclrtStream stream, int32_t* id) {
  *id = stream == nullptr ? 0 : static_cast<Stream*>(stream)->id;
  return ACL_SUCCESS;
}

aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t) { return ACL_SUCCESS; }
aclError aclrtSetStreamOverflowSwitch(aclrtStream, uint32_t) { return ACL_SUCCESS; }

aclError aclrtGetStreamOverflowSwitch(aclrtStream, uint32_t* flag) {
  *flag = 0;
  return ACL_SUCCESS;
}

// How many cores work may use: of a device all that there are, of a stream what was set.
aclError aclrtGetDeviceResLimit(int32_t, aclrtDevResLimitType type, uint32_t* value) {
  *value = kCores[type];
  return ACL_SUCCESS;
}

aclError aclrtSetStreamResLimit(aclrtStream stream, aclrtDevResLimitType type, uint32_t value) {
  std::lock_guard<std::mutex> lock(limits().mutex);
  limits().cores[{stream, type}] = value;
  return ACL_SUCCESS;
}

aclError aclrtGetStreamResLimit(aclrtStream stream, aclrtDevResLimitType type, uint32_t* value) {
  std::lock_guard<std::mutex> lock(limits().mutex);
  auto found = limits().cores.find({stream, type});
  *value = found == limits().cores.end() ? kCores[type] : found->second;
  return ACL_SUCCESS;
}

aclError aclrtResetStreamResLimit(aclrtStream stream) {
  std::lock_guard<std::mutex> lock(limits().mutex);
  limits().cores.erase({stream, ACL_RT_DEV_RES_CUBE_CORE});
  limits().cores.erase({stream, ACL_RT_DEV_RES_VECTOR_CORE});
  return ACL_SUCCESS;
}

aclError aclrtCreateEvent(aclrtEvent* event) {
  *event = new Event{now()};
  return ACL_SUCCESS;
}

aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t) { return aclrtCreateEvent(event); }
aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t) { return aclrtCreateEvent(event); }

aclError aclrtDestroyEvent(aclrtEvent event) {
  delete as_event(event);
  return ACL_SUCCESS;
}

aclError aclrtRecordEvent(aclrtEvent event, aclrtStream) {
  as_event(event)->microseconds = now();
  return ACL_SUCCESS;
}

aclError aclrtResetEvent(aclrtEvent, aclrtStream) { return ACL_SUCCESS; }
aclError aclrtStreamWaitEvent(aclrtStream, aclrtEvent) { return ACL_SUCCESS; }
aclError aclrtSynchronizeEvent(aclrtEvent) { return ACL_SUCCESS; }

aclError aclrtQueryEventStatus(aclrtEvent, aclrtEventRecordedStatus* status) {
  *status = ACL_EVENT_RECORDED_STATUS_COMPLETE;
  return ACL_SUCCESS;
}

aclError aclrtQueryEventWaitStatus(aclrtEvent, aclrtEventWaitStatus* status) {
  *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
  return ACL_SUCCESS;
}

aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent start, aclrtEvent end) {
  *milliseconds = static_cast<float>((as_event(end)->microseconds - as_event(start)->microseconds) / 1000);
  return ACL_SUCCESS;
}

aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t* microseconds) {
  *microseconds = static_cast<uint64_t>(as_event(event)->microseconds);
  return ACL_SUCCESS;
}

// Host functions that are queued on a stream run at once.
aclError aclrtLaunchCallback(aclrtCallback function, void* data, aclrtCallbackBlockType, aclrtStream) {
  function(data);
  return ACL_SUCCESS;
}

aclError aclrtLaunchHostFunc(aclrtStream, aclrtHostFunc function, void* data) {
  function(data);
  return ACL_SUCCESS;
}

aclError aclrtSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }
aclError aclrtUnSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }
aclError aclrtProcessReport(int32_t) { return ACL_SUCCESS; }
