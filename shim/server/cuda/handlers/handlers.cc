#include "server/cuda/handlers/handlers.h"

namespace xmig::server {

Handlers::Handlers(const Session& session, ModulePreload& preload, PreparedCommunicators& prepared, Snapshots& snapshots,
                   Relocation& relocation)
    : driver(session.device.driver()),
      objects(session.objects),
      real_contexts(session.services.contexts),
      intake(driver),
      streams(session),
      variables(session, streams),
      addresses(session.memory.live, session.services.job, variables, session.schedule, intake),
      peers(session),
      events(session, streams, addresses, outside),
      copies(session, streams, addresses, peers, intake, outside),
      host_functions(session, streams, outside),
      collectives(session, prepared, streams, addresses, outside),
      modules(session, preload, streams, variables, addresses),
      launches(session, streams, variables, addresses),
      graphs(session, streams, addresses, *this),
      memory(session, snapshots, relocation),
      contexts(session, streams, modules, graphs, peers),
      tensor_maps(driver) {}

void Handlers::destroy_all() {
  collectives.destroy_all();
  graphs.destroy_all();
  modules.destroy_all();
  events.destroy_all();
  streams.destroy_all();
  intake.close([this](uint32_t ordinal) { real_contexts.use(ordinal); });
}

// But for what lies in memory.
void Handlers::describe(SnapshotContent& content, std::vector<uint64_t>& images) {
  objects.modules.for_each([&](uint32_t, const Module& module) { images.push_back(module.image); });
  objects.graphs.for_each([&](uint32_t, const GraphExec& graph) { images.push_back(graph.image); });
  objects.events.for_each([&](uint32_t index, const Event& event) {
    if (event.recorded != 0) content.events.push_back({index, event.recorded});
  });
  content.objects = objects.records.list();
  for (const auto& [address, variable] : variables.twins()) content.variables.push_back(variable);
}

}  // namespace xmig::server
