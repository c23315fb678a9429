// Tests of the core when something below it fails, each failure made on purpose.
#pragma once

namespace ring::test {

// Each throws std::logic_error when a check fails.
void check_links();
void check_tcp();
void check_notices();
void check_notice_kinds();
void check_memory();
void check_blocks();
void check_closing();
void check_out_of_memory();

}  // namespace ring::test
