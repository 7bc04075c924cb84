// Starts a kernel of any signature with arguments that lie at given addresses.
#pragma once

#include <type_traits>
#include <utility>

#include "vocabulary.hpp"

namespace emulated {

template <class... Parameters, unsigned long... I>
void call(void (*kernel)(Parameters...), void** arguments, std::index_sequence<I...>) {
  kernel(*static_cast<std::remove_cv_t<std::remove_reference_t<Parameters>>*>(arguments[I])...);
}

template <class... Parameters>
constexpr unsigned long count(void (*)(Parameters...)) {
  return sizeof...(Parameters);
}

}  // namespace emulated

#define EMULATED_ENTRY(KERNEL)                                                                    \
  extern "C" int emulated_run(const emulated::Grid* grid, void** arguments, char* report,          \
                              unsigned report_bytes) {                                             \
    return emulated::run(                                                                          \
        *grid,                                                                                     \
        [](void** given) {                                                                         \
          emulated::call(KERNEL, given, std::make_index_sequence<emulated::count(KERNEL)>());      \
        },                                                                                         \
        arguments, report, report_bytes);                                                          \
  }
