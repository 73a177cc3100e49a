// What the descriptor store holds: descriptors by name, and the programs to which they belong.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "ipc/fd.h"

namespace xmig::store {

struct Descriptor {
  uint64_t number;      // the order in which they came
  std::string process;  // whose it is; empty: the daemon's own
  ipc::UniqueFd fd;
};

class Held {
 public:
  void keep(const std::string& name, const std::string& process, ipc::UniqueFd fd);
  void drop(const std::string& name);
  // `pidfd` is readable once the process's program has exited.
  void watch(const std::string& process, ipc::UniqueFd pidfd);

  const std::map<std::string, Descriptor>& descriptors() const { return descriptors_; }
  std::vector<int> watched() const;
  // Nobody needs what belongs to a program that has exited. Returns whether anything is left that belongs to a program.
  bool forget_the_exited();

 private:
  struct Program {
    ipc::UniqueFd pidfd;
    uint64_t holds = 0;  // descriptors
  };
  void left(const std::string& process);

  uint64_t next_ = 0;
  std::map<std::string, Descriptor> descriptors_;
  std::map<std::string, Program> programs_;
};

}  // namespace xmig::store
