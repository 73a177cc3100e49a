// The server's life: a warm standby, then one job, until its program ends.
//
// This thread listens to the daemon and watches the program; the job itself is the executor's thread.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "device/device.h"
#include "server/contexts.h"
#include "server/daemon.h"
#include "server/executor.h"
#include "server/faults.h"
#include "server/injector.h"
#include "server/job.h"
#include "server/options.h"
#include "server/requests.h"

namespace xmig::server {

class Server {
 public:
  Server(Options options, std::unique_ptr<device::Device> device);
  ~Server();

  // Until there is nothing more to do: the exit status of the process. `started` is when the process was.
  int run(uint64_t started);

 private:
  // Each returns an exit status when the server is to end.
  std::optional<int> listen();
  std::optional<int> reconnect();
  std::optional<int> handle(Request request);
  std::optional<int> operator()(Assign& request);
  std::optional<int> operator()(MemoryAdd& request);
  std::optional<int> operator()(Go& request);
  std::optional<int> operator()(Inject& request);
  std::optional<int> operator()(TakeCut& request);
  std::optional<int> operator()(Pause& request);
  std::optional<int> operator()(Rebind& request);
  std::optional<int> operator()(Continue& request);
  std::optional<int> operator()(Stop& request);
  std::optional<int> resume(std::optional<Rebind> rebind);

  bool watch_client();
  void begin(bool recover);
  void serve(bool recover, std::vector<Hosted> given);
  [[noreturn]] void lose(const std::string& why);

  const Options options_;
  const std::unique_ptr<device::Device> device_;
  Daemon daemon_;
  Log log_{daemon_};
  Contexts contexts_;
  Faults faults_;
  Injector injector_;

  int socket_ = -1;  // the daemon's; owned by daemon_
  ipc::UniqueFd client_;  // pidfd
  std::optional<Assign> assignment_;
  std::optional<Job> job_;
  std::vector<Hosted> given_;
  std::unique_ptr<Executor> executor_;
  std::thread thread_;
  std::atomic<bool> serving_{false};  // the job's state is complete: a new daemon can be told of it
  bool begun_ = false;
  bool pausing_ = false;  // the program may end in order to be restored elsewhere
};

// The job is over: every waiting thread of the program wakes up and gets `error`.
void mark_lost(const Job& job, int error);

}  // namespace xmig::server
