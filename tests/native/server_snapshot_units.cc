// What a snapshot needs without a device: its file, the live set, where variables are, records that are kept.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "check.h"
#include "device/device.h"
#include "server/cuda/objects/variable_directory.h"
#include "server/memory/live_set.h"
#include "server/snapshot/rounding.h"
#include "server/snapshot/snapshot_file.h"

namespace {

using namespace xmig;
using namespace xmig::server;

SnapshotContent example() {
  SnapshotContent content;
  content.number = 7;
  content.position = 4096;
  content.sequence = 99;
  content.failures[1] = {719, 0, 42};
  content.memory = {{journal::kDeviceBase, 4 << 20}, {journal::kDeviceBase + (64 << 20), 2 << 20}};
  content.live = {{journal::kDeviceBase, 100, 3}, {journal::kDeviceBase + 512, 1 << 20, 4}};
  content.chunks = {{journal::kDeviceBase, 0x1234, kShadowBase}, {journal::kDeviceBase + (2 << 20), 5, kShadowBase + 7}};
  content.images = {{1, 1000}};
  content.events = {{3, 98}};
  for (size_t i = 0; i < 5; ++i) content.objects.add(std::vector<std::byte>(56 + i * 8, std::byte(i)));
  return content;
}

void snapshot_file() {
  const SnapshotContent content = example();
  const std::vector<std::byte> bytes = serialise(content);
  const auto read = parse_snapshot(bytes);
  CHECK(read && read->number == 7 && read->position == 4096 && read->sequence == 99);
  CHECK(read->failures[1].error == 719 && read->failures[1].sequence == 42 && read->failures[0].error == 0);
  CHECK(read->memory.size() == 2 && read->memory[1].bytes == 2 << 20);
  CHECK(read->live.size() == 2 && read->live[1].context == 4);
  CHECK(read->chunks.size() == 2 && read->chunks[0].hash == 0x1234);
  CHECK(read->images.size() == 1 && read->events.size() == 1 && read->events[0].sequence == 98);
  CHECK(read->objects.size() == 5 && std::ranges::equal(read->objects.bytes(), content.objects.bytes()));
  for (size_t length = 0; length < bytes.size(); ++length) CHECK(!parse_snapshot(std::span(bytes).first(length)));
  std::mt19937 random(5);
  for (int i = 0; i < 2000; ++i) {
    std::vector<std::byte> damaged = bytes;
    damaged[random() % damaged.size()] ^= static_cast<std::byte>(1u << random() % 8);
    CHECK(!parse_snapshot(damaged));
  }
}

// What says where variables are kept: written, read, and damaged.
void variable_directory() {
  std::vector<KeptVariable> variables = {{"counter", 4, 0, 0, true}, {"where", 16, 0, 1, true}, {"table", 1 << 20, 0, 0, false}};
  const uint64_t bytes = place_variables(variables);
  CHECK(bytes > (1 << 20) + 36 && bytes < (1 << 20) + 4096);
  uint64_t end = 0;  // none lies in another, and each as its device wants it
  for (const KeptVariable& variable : variables) {
    CHECK(variable.content >= end && variable.content % 16 == 0);
    end = variable.content + variable.bytes;
    if (variable.first == 0) continue;
    CHECK(variable.first >= end && variable.first % 16 == 0);
    end = variable.first + variable.bytes;
  }
  CHECK(end <= bytes && variables[1].first != 0 && variables[0].first == 0);
  const std::vector<std::byte> good = serialise_variables(variables, bytes);
  CHECK(good.size() <= variables[0].content && variable_directory_bytes(std::span(good).first(64), bytes) == good.size());
  const auto same = parse_variables(good, bytes);
  CHECK(same && serialise_variables(*same, bytes) == good && (*same)[1].name == "where" && (*same)[0].written);
  for (size_t length = 0; length < good.size(); ++length) {
    const auto short_of = parse_variables(std::span(good).first(length), bytes);
    CHECK(!short_of && !short_of.why().empty());
  }
  for (size_t i = 0; i < good.size(); ++i) {
    std::vector<std::byte> damaged = good;
    damaged[i] ^= std::byte{1};
    CHECK(!parse_variables(damaged, bytes));
  }
  CHECK(!parse_variables(good, bytes + 1) && !parse_variables({}, 0));
  std::vector<KeptVariable> huge = {{"a", ~0ull - 64, 0, 0, false}, {"b", 64, 0, 0, false}};
  CHECK(place_variables(huge) == 0);
  huge = {{std::string(kMaxVariableDirectory, 'x'), 4, 0, 0, false}};
  CHECK(place_variables(huge) == 0);
}

void live_set() {
  LiveSet live;
  CHECK(live.add({1000, 100, 1}));
  CHECK(live.add({1100, 50, 2}));
  CHECK(live.add({2000, 10, 1}));
  CHECK(!live.add({1099, 1, 1}) && !live.add({990, 11, 1}) && !live.add({900, 5000, 1}) && !live.add({5, 0, 1}));
  CHECK(!live.add({~0ull - 5, 10, 1}));
  CHECK(live.contains(1000, 150) && live.contains(1050, 100) && live.contains(1149, 1) && live.contains(7, 0));
  CHECK(!live.contains(1000, 151) && !live.contains(999, 1) && !live.contains(2005, 6) && !live.contains(2000, ~0ull));
  CHECK(live.overlaps(1149, 1) && !live.overlaps(1150, 850) && live.overlaps(1150, 851));
  CHECK(live.bytes() == 160);
  CHECK(live.remove(1100) && !live.remove(1100) && !live.remove(1001));
  CHECK(!live.contains(1000, 101));
  live.remove_context(1);
  CHECK(live.listed().ranges.empty() && live.bytes() == 0 && !live.contains(1000, 1));
}

// What a snapshot writes down, whatever has come and gone since the one before.
void live_set_listed() {
  using journal::kGranule;
  LiveSet live;
  const auto granules = [&](std::vector<uint64_t> expected) {
    for (uint64_t& granule : expected) granule *= kGranule;
    return live.listed().granules == expected;
  };
  CHECK(granules({}));
  live.add({7 * kGranule + 5, 2 * kGranule, 1});
  live.add({2 * kGranule, 10, 1});
  CHECK(granules({2, 7, 8, 9}));
  live.add({2 * kGranule + 10, kGranule, 2});  // of a granule that is there already
  CHECK(granules({2, 3, 7, 8, 9}) && live.listed().ranges.size() == 3 && live.listed().ranges[1].context == 2);
  live.remove(7 * kGranule + 5);
  CHECK(granules({2, 3}));
  live.remove_context(1);
  CHECK(granules({2, 3}) && live.listed().ranges.size() == 1);
  live.clear();
  CHECK(granules({}));
}

// What nobody needs is not written down, for as long as it is allocated.
void live_set_discarded() {
  using journal::kGranule;
  LiveSet live;
  const auto granules = [&](std::vector<uint64_t> expected) {
    for (uint64_t& granule : expected) granule *= kGranule;
    return live.listed().granules == expected;
  };
  live.add({10 * kGranule, 4 * kGranule, 1});
  live.add({14 * kGranule, kGranule + 512, 2});
  CHECK(!live.discard(9 * kGranule, 2 * kGranule) && !live.discard(15 * kGranule, kGranule) && !live.discard(0, 0));
  CHECK(!live.discard(10 * kGranule, ~0ull - kGranule + 1) && granules({10, 11, 12, 13, 14, 15}));
  CHECK(live.discard(11 * kGranule, 4 * kGranule) && granules({10, 15}) && live.listed().ranges.size() == 2);
  CHECK(live.contains(10 * kGranule, 5 * kGranule));  // copies may go there
  CHECK(live.bytes() == kGranule + 512);
  CHECK(live.discard(11 * kGranule, kGranule) && live.bytes() == kGranule + 512);  // once more
  live.reuse(12 * kGranule, kGranule);
  live.reuse(12 * kGranule, kGranule);
  CHECK(granules({10, 12, 15}) && live.bytes() == 2 * kGranule + 512);
  live.reuse(~0ull - kGranule + 1, kGranule);
  // Freed and allocated again, they are preserved.
  CHECK(live.remove(10 * kGranule) && granules({15}) && live.bytes() == 512);
  live.add({10 * kGranule, 4 * kGranule, 1});
  CHECK(granules({10, 11, 12, 13, 15}) && live.bytes() == 4 * kGranule + 512);
  live.remove_context(2);
  CHECK(live.discard(10 * kGranule, 4 * kGranule) && granules({}) && live.bytes() == 0);
  live.clear();
  live.add({10 * kGranule, kGranule, 1});
  CHECK(granules({10}));
}

std::vector<std::byte> record_of(size_t bytes, int content) { return {bytes, static_cast<std::byte>(content)}; }

// They are listed in the order in which they happened, and while somebody keeps them.
void stored_records() {
  StoredRecords records;
  const auto listed = [&](const std::vector<std::vector<std::byte>>& expected) {
    std::vector<std::vector<std::byte>> found;
    for (const std::span<const std::byte> record : records.list()) found.emplace_back(record.begin(), record.end());
    return found == expected && records.list().size() == expected.size();
  };
  CHECK(listed({}));
  auto third = records.keep(30, record_of(5, 3));
  auto first = records.keep(10, record_of(0, 1));
  CHECK(listed({record_of(0, 1), record_of(5, 3)}));
  {
    const auto second = records.keep(20, record_of(9, 2));
    CHECK(listed({record_of(0, 1), record_of(9, 2), record_of(5, 3)}));
  }
  CHECK(listed({record_of(0, 1), record_of(5, 3)}));
  first = records.keep(40, record_of(2, 4));  // set again
  CHECK(listed({record_of(5, 3), record_of(2, 4)}));
  std::vector<StoredRecords::Kept> all;
  all.push_back(std::move(third));
  all.push_back(std::move(first));
  CHECK(listed({record_of(5, 3), record_of(2, 4)}));
  all[0] = {};
  CHECK(listed({record_of(2, 4)}));
  all.clear();
  CHECK(listed({}));
}

// What rounding has to be, by another way: all numbers of the type with so few bits are candidates, and the nearest one counts; of two
// the even one.
template <typename Word, int kMantissa>
void rounding_of(journal::NumberType type, std::vector<Word> words) {
  constexpr int kBits = 8 * sizeof(Word);
  constexpr Word kSign = static_cast<Word>(Word{1} << (kBits - 1));
  constexpr Word kInfinity = static_cast<Word>(((Word{1} << (kBits - 1 - kMantissa)) - 1) << kMantissa);
  const auto value = [](Word magnitude) {
    const int bias = (1 << (kBits - 2 - kMantissa)) - 1, exponent = static_cast<int>(magnitude >> kMantissa);
    const auto fraction = static_cast<long double>((magnitude & ((Word{1} << kMantissa) - 1)) | (Word{1} << kMantissa));
    return std::ldexp(fraction, exponent - bias - kMantissa);
  };
  for (uint32_t keep = 1; keep <= 51; keep += keep < 12 ? 1 : 13) {
    std::vector<Word> rounded = words;
    RoundedNumbers found;
    round_numbers(std::as_writable_bytes(std::span(rounded)), type, keep, found);
    CHECK(found.bytes == words.size() * sizeof(Word));
    uint64_t changed = 0;
    long double relative = 0, absolute = 0;
    for (size_t i = 0; i < words.size(); ++i) {
      const Word before = static_cast<Word>(words[i] & ~kSign), after = static_cast<Word>(rounded[i] & ~kSign);
      CHECK((words[i] & kSign) == (rounded[i] & kSign));
      if (before >> kMantissa == 0 || before >= kInfinity || keep >= kMantissa) {
        CHECK(before == after);
        continue;
      }
      const Word step = static_cast<Word>(Word{1} << (kMantissa - keep));
      CHECK(after % step == 0 && after >> kMantissa != 0 && after < kInfinity);
      const Word down = static_cast<Word>(before / step * step), up = static_cast<Word>(down + step);
      const long double here = value(before), below = here - value(down), above = value(up) - here;
      const bool is_down = up >= kInfinity || below < above || (below == above && down / step % 2 == 0);
      CHECK(after == (before == down || is_down ? down : up));
      changed += before != after;
      const long double error = after > before ? above : below;
      if (before != after) absolute = std::max(absolute, error), relative = std::max(relative, error / here);
    }
    CHECK(found.changed == changed && found.largest_absolute == static_cast<double>(absolute));
    CHECK(std::abs(found.largest_relative - static_cast<double>(relative)) <= 1e-15);
    // What was rounded stays as it is.
    std::vector<Word> twice = rounded;
    round_numbers(std::as_writable_bytes(std::span(twice)), type, keep, found);
    CHECK(twice == rounded && found.changed == changed);
  }
}

// All numbers of the short types; of the others those at every edge, and many.
void rounding() {
  std::vector<uint16_t> all(1 << 16);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  rounding_of<uint16_t, 10>(journal::NumberType::kFloat16, all);
  rounding_of<uint16_t, 7>(journal::NumberType::kBfloat16, all);
  std::mt19937_64 random(3);
  std::vector<uint32_t> singles;
  std::vector<uint64_t> doubles;
  const auto around = [](auto& into, auto at) {
    for (int more = -3; more <= 3; ++more) {
      for (const auto word : {at, static_cast<decltype(at)>(~at)}) into.push_back(static_cast<decltype(at)>(word + more));
    }
  };
  for (int bit = 0; bit < 32; ++bit) around(singles, uint32_t{1} << bit);
  for (int bit = 0; bit < 64; ++bit) around(doubles, uint64_t{1} << bit);
  for (uint32_t edge : {0x007fffffu, 0x00800000u, 0x7f7fffffu, 0x7f800000u, 0x7fc00000u}) around(singles, edge);
  for (uint64_t edge : {0x000fffffffffffffull, 0x7fefffffffffffffull, 0x7ff0000000000000ull}) around(doubles, edge);
  for (int i = 0; i < 50'000; ++i) {
    singles.push_back(static_cast<uint32_t>(random()));
    doubles.push_back(random());
  }
  rounding_of<uint32_t, 23>(journal::NumberType::kFloat32, singles);
  rounding_of<uint64_t, 52>(journal::NumberType::kFloat64, doubles);
}

}  // namespace

int main() {
  rounding();
  snapshot_file();
  variable_directory();
  live_set();
  live_set_listed();
  live_set_discarded();
  stored_records();
  return 0;
}
