#include "server/handlers/handlers.h"

namespace xmig::server {

Handlers::Handlers(const Session& session, Preload& preload, Snapshots& snapshots, Relocation& relocation)
    : driver(session.services.driver),
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
      modules(session, preload, streams, variables, addresses),
      launches(session, streams, variables, addresses),
      graphs(session, streams, addresses, *this),
      memory(session, snapshots, relocation),
      contexts(session, streams, modules, graphs, peers),
      tensor_maps(driver) {}

void Handlers::destroy_all() {
  graphs.destroy_all();
  modules.destroy_all();
  events.destroy_all();
  streams.destroy_all();
  intake.close([this](uint32_t ordinal) { real_contexts.use(ordinal); });
}

}  // namespace xmig::server
