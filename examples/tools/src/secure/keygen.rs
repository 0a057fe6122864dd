//! `rdma-pingpong keygen` makes a certificate authority, two identities and a pre-shared key, with which a user can try secured
//! connections.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use clap::Args;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair};
use rdma_reactor::system_entropy;

use crate::pingpong::failure::{Ending, Failure};
use crate::pingpong::output::Output;

/// Flags of `keygen`.
// local: arguments of the program
#[derive(Debug, Args)]
pub struct KeygenArgs {
    /// Directory for the files; it is created if it does not exist, and existing files are not replaced
    #[arg(value_name = "DIR", default_value = ".")]
    pub directory: PathBuf,
    /// Host names and addresses for which both certificates are valid
    #[arg(long, value_name = "A,B,...", value_delimiter = ',', default_value = "localhost,127.0.0.1,::1")]
    pub names: Vec<String>,
}

fn write(directory: &Path, name: &str, text: &str) -> Result<PathBuf, Failure> {
    let path = directory.join(name);
    let failed = |error| Failure::new(format!("{}: {error}", path.display()));
    // The file is readable and writable only for its owner, because it may contain a private key.
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path).map_err(failed)?;
    file.write_all(text.as_bytes()).map_err(failed)?;
    Ok(path)
}

/// Makes the files, and prints their names.
///
/// # Errors
/// A file exists already or cannot be written, or a name cannot be in a certificate.
pub fn run(args: &KeygenArgs) -> Result<Ending, Failure> {
    let mut output = Output::stdout();
    for path in make(&args.directory, &args.names)? {
        output.line(path.display());
    }
    output.line("for tests: the authority's own key is not kept, so nothing else can be signed");
    Ok(Ending::Complete)
}

/// Makes the files `ca.pem`, `server.pem`, `server.key`, `client.pem`, `client.key` and `psk`. Returns their paths.
///
/// # Errors
/// Those of [`run`].
pub fn make(directory: &Path, names: &[String]) -> Result<Vec<PathBuf>, Failure> {
    fs::create_dir_all(directory).map_err(|error| Failure::new(format!("{}: {error}", directory.display())))?;
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.distinguished_name.push(DnType::CommonName, "rdma-pingpong keygen");
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().map_err(Failure::new)?);
    let authority = authority.map_err(Failure::new)?;
    let mut made = vec![write(directory, "ca.pem", &authority.pem())?];
    for side in ["server", "client"] {
        let mut params = CertificateParams::new(names)
            .map_err(|error| Failure::new(format!("--names {}: {error}", names.join(","))))?;
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.distinguished_name.push(DnType::CommonName, side);
        let key = KeyPair::generate().map_err(Failure::new)?;
        let certificate = params.signed_by(&key, &authority).map_err(Failure::new)?;
        made.push(write(directory, &format!("{side}.pem"), &certificate.pem())?);
        made.push(write(directory, &format!("{side}.key"), &key.serialize_pem())?);
    }
    let mut key = [0; 32];
    system_entropy()(&mut key);
    let digits: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
    made.push(write(directory, "psk", &format!("cluster:{digits}\n"))?);
    Ok(made)
}
