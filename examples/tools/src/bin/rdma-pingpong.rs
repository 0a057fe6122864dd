//! Measures latency and throughput between two processes: `rdma-pingpong server`, `client ADDR`, or both with `demo`.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    rdma_reactor_tools::pingpong::main(std::env::args_os())
}
