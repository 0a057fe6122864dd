//! Attacks during connection setup and in shared memory, by real processes on this host. The test runs the short form of `rdma-hostile`,
//! which counts successful honest clients and operations without access rights. It measures no time; `make hostile` does.

use std::process::Command;

use rdma_reactor_tests::patience::TEST;

#[test]
fn newcomers_come_up_beside_attackers() {
    let mut command = Command::new("timeout");
    let limit = TEST.as_secs().to_string();
    command.args(["-s", "KILL", &limit, env!("CARGO_BIN_EXE_rdma-hostile"), "--short"]).env_remove("RUST_LOG");
    let output = command.output().expect("it starts");
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}\n{stdout}{stderr}", output.status);
    print!("{stdout}");
}
