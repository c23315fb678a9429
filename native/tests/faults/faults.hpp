// What must hold when something below the core fails, each arranged on purpose.
#pragma once

namespace ring::test {

// Each throws std::logic_error for what does not hold.
void check_links();
void check_tcp();
void check_notices();
void check_notice_kinds();
void check_memory();
void check_blocks();
void check_closing();
void check_out_of_memory();

}  // namespace ring::test
