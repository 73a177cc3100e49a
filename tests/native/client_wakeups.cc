// The client against a daemon and a server that belong to the test: how it wakes a server that sleeps.
#include <cstdio>

#include "client_jobs.h"
#include "processors.h"

namespace {

using namespace harness;

// A thread's slot has the processor that it last waited on.
void says_where_it_runs() {
  Fixture test;
  test.start();
  for (const int processor : processors()) {
    run_on(processor);
    CU(cuCtxSynchronize());
    bool reported = false;
    for (const auto& slot : process.header->threads) reported |= slot.tid != 0 && slot.processor.load() == processor + 1u;
    CHECK(reported);
  }
}

// A server that says that it sleeps on the processor `away` from this thread's, and never comes: whether a call waits or not, the
// usher is woken, which can run; and the server is informed that it sleeps in the wrong place, which a call that does not wait need not
// do (`silent_without_waiting`).
void does_not_come(int away, bool silent_without_waiting) {
  Fixture test;
  test.start();
  const CUfunction function = test.kernel();
  Arguments arguments;
  const int here = processors().front();
  run_on(here);
  auto& header = *process.header;
  for (const bool waits : {true, false}) {
    test.control.asleep_on = here + away;
    const uint32_t usher = header.usher.load(), late = header.late.load();
    eventually([&] {
      CU(waits ? cuCtxSynchronize() : launch(function, arguments));
      return header.usher.load() != usher && (header.late.load() != late || (!waits && silent_without_waiting));
    });
    test.control.asleep_on = -1;
    CU(cuCtxSynchronize());
  }
  CHECK(test.control.bad == 0);
}

// It can run on another processor only.
void server_elsewhere() { does_not_come(1, false); }

// It does not run although the thread gives way: a call that waits does not wait for that, and one that does not wait has the
// usher woken at once.
void server_that_does_not_come() { does_not_come(0, true); }

// One that sleeps anywhere, as all did before: nobody else is woken.
void server_anywhere() {
  Fixture test;
  test.start();
  for (int i = 0; i < 200; ++i) {
    eventually([&] { return process.header->server_sleeping.load() != journal::kAwake; });
    CU(cuCtxSynchronize());
  }
  CHECK(process.header->usher.load() == 0 && process.header->late.load() == 0);
}

const Tests kTests = {
    {"says_where_it_runs", says_where_it_runs},
    {"server_elsewhere", server_elsewhere},
    {"server_that_does_not_come", server_that_does_not_come},
    {"server_anywhere", server_anywhere},
};

}  // namespace

int main(int argc, char** argv) { return run_test(argc, argv, kTests); }
