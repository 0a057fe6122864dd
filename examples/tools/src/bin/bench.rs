//! Compares the cost of the same work on bare TCP and on `rdma-pingpong`, in one run.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    rdma_reactor_tools::bench::main(std::env::args_os())
}
