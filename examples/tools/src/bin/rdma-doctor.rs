//! Reports what this machine can do with RDMA, and why not more: `rdma-doctor [ADDRESS...]`.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    rdma_reactor_tools::doctor::main(std::env::args_os())
}
